"""Programs that never call us: what they write into the checkpoint directory is kept safe all the same, once."""

import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from tests.harness.agent_process import AgentProcess, tree, wait_until, write_checkpoint
from tests.harness.bucket_view import BucketView
from tests.servers.server import Bucket

from mooring_api.names import ENV_VOLUME

# They bound a hang: importing torch alone takes many seconds on a busy machine.
pytestmark = pytest.mark.timeout(300)
RUN_SECONDS = 240.0

PROGRAM = """
import os, sys, warnings
from pathlib import Path
import torch
import torch.distributed.checkpoint as dcp
warnings.simplefilter("ignore")
directory = Path(os.environ["MOORING_CHECKPOINT_DIRECTORY"])
for step in map(int, sys.argv[1].split(",")):
    weights = {"weights": torch.full((1000,), float(step))}
    torch.save(weights, directory / f"model-{step}.pt")
    dcp.save(weights, checkpoint_id=directory / f"sharded-{step}", no_dist=True)
print("saved", flush=True)
if sys.argv[2] == "wait":
    sys.stdin.read()
"""


def run_line(bucket: Bucket, volume: Path, *arguments: str) -> list[str]:
    line = [sys.executable, "-m", "mooring_agent", "run", f"--to={bucket.destination}", f"--volume={volume}"]
    line += [f"--endpoint-url={bucket.endpoint_url}", "--log-format=json"]
    return [*line, "--", sys.executable, "-c", PROGRAM, *arguments]


def announced(log: str) -> Counter[str]:
    """How often each name was announced."""
    lines = [line for line in log.splitlines() if '"checkpoint.announced"' in line]
    return Counter(line.split('"name": "')[1].split('"')[0] for line in lines)


def names(view: BucketView) -> list[str]:
    """Committed checkpoints, straight from the bucket."""
    saves = [marker.rpartition("/")[2].split(".", 1)[1].removesuffix(".json") for marker in view.markers()]
    keys = view.keys()
    folders = {tuple(key.split("/")[:2]) for key in keys}
    return sorted(name for name, save in (folder for folder in folders if len(folder) == 2) if save in saves)


def test_a_program_that_saves_and_ends_at_once_has_every_checkpoint_committed_once(
    rclone_bucket: Bucket, tmp_path: Path
) -> None:
    line = run_line(rclone_bucket, tmp_path / "volume", "10,20", "end")
    result = subprocess.run(line, capture_output=True, text=True, timeout=RUN_SECONDS, check=False)
    assert result.returncode == 0, result.stderr
    view = BucketView(rclone_bucket)
    expected = ["model-10.pt", "model-20.pt", "sharded-10", "sharded-20"]
    assert names(view) == expected
    assert announced(result.stderr) == dict.fromkeys(expected, 1)
    assert all(row["problems"] == [] for row in view.verify())


def test_what_was_restored_or_committed_before_is_not_announced_again(rclone_bucket: Bucket, tmp_path: Path) -> None:
    first = run_line(rclone_bucket, tmp_path / "volume", "10", "end")
    subprocess.run(first, capture_output=True, timeout=RUN_SECONDS, check=True)
    view = BucketView(rclone_bucket)
    before = names(view)
    assert before == ["model-10.pt", "sharded-10"]
    for volume, step in (("volume", 30), ("another", 40)):
        again = run_line(rclone_bucket, tmp_path / volume, str(step), "end")
        result = subprocess.run(again, capture_output=True, text=True, timeout=RUN_SECONDS, check=False)
        assert result.returncode == 0, result.stderr
        new = [f"model-{step}.pt", f"sharded-{step}"]
        assert announced(result.stderr) == dict.fromkeys(new, 1)
        before = sorted([*before, *new])
        assert names(view) == before


def test_a_checkpoint_is_committed_while_its_program_goes_on(rclone_bucket: Bucket, tmp_path: Path) -> None:
    line = run_line(rclone_bucket, tmp_path / "volume", "10", "wait")
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            assert process.stdout is not None
            wait_until(lambda: names(BucketView(rclone_bucket)) == ["model-10.pt", "sharded-10"], 120, "both committed")
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert process.wait(90) == 128 + signal.SIGTERM
        finally:
            process.kill()


def test_what_a_client_has_announced_is_not_announced_again(rclone_bucket: Bucket, tmp_path: Path) -> None:
    with AgentProcess(tmp_path / "volume", rclone_bucket.destination, endpoint_url=rclone_bucket.endpoint_url) as agent:
        source = write_checkpoint(agent.checkpoints / "checkpoint-5", {"rng_state.pth": 100})
        (source / "trainer_state.json").write_text("{}")
        agent.wait_committed(agent.announce(source, 5, save="attempt-5").save)
        # Later than that one and found: the watch has looked at both.
        other = write_checkpoint(agent.checkpoints / ".checkpoint-6", {"rng_state.pth": 100})
        (other / "trainer_state.json").write_text("{}")
        other.rename(agent.checkpoints / "checkpoint-6")
        original = tree(agent.checkpoints / "checkpoint-6")
        wait_until(lambda: len(agent.log("checkpoint.committed")) == 2, 60, "the watch found the other one")
        assert announced(agent.log_text()) == {"checkpoint-5": 1, "checkpoint-6": 1}
    assert tree(BucketView(rclone_bucket).restore(tmp_path / "other")) == original


def test_the_log_asks_nobody_to_announce_what_was_announced(tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store"
    with AgentProcess(tmp_path / "volume", store) as agent:
        environment = {**os.environ, ENV_VOLUME: str(agent.volume)}
        subprocess.run([sys.executable, "-c", CLIENT], env=environment, check=True, timeout=RUN_SECONDS)
        source = write_checkpoint(agent.checkpoints / "by-call-20", {"state": 100})
        agent.wait_committed(agent.announce(source, 20, save="attempt-20").save)
        # Later than those, and of a layout that shows nothing either: once it is named, they were looked at.
        write_checkpoint(agent.checkpoints / "unknown-30", {"state": 100})
        wait_until(lambda: bool(_not_complete(agent)), 60, "the unknown one is named")
        agent.kill()
        agent.start()
        wait_until(lambda: len(_not_complete(agent)) > 1, 60, "it is named by the next agent")
        assert _not_complete(agent) == ["unknown-30"] * 2


CLIENT = """
import mooring
checkpointer = mooring.Checkpointer()
with checkpointer.save(10) as directory:
    (directory / "state").write_text("10")
"""


def _not_complete(agent: AgentProcess) -> list[str]:
    """Names in the checkpoint directory that the log calls incomplete."""
    return [Path(line["path"]).name for line in agent.log("checkpoint_not_complete")]


def test_a_file_cut_short_is_not_committed_even_at_the_end(rclone_bucket: Bucket, tmp_path: Path) -> None:
    program = (
        "import os, torch; from pathlib import Path;"
        "path = Path(os.environ['MOORING_CHECKPOINT_DIRECTORY']) / 'model-10.pt';"
        "torch.save({'weights': torch.ones(1000)}, path); os.truncate(path, path.stat().st_size - 100)"
    )
    line = [*run_line(rclone_bucket, tmp_path / "volume")[:-1], program]
    result = subprocess.run(line, capture_output=True, text=True, timeout=RUN_SECONDS, check=False)
    assert result.returncode == 0, result.stderr
    assert names(BucketView(rclone_bucket)) == []
    assert (tmp_path / "volume/checkpoints/model-10.pt").exists()


def test_no_name_in_the_watched_directory_ends_the_agent_or_hides_another(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with AgentProcess(tmp_path / "volume", f"file://{store}") as agent:
        good = tmp_path / "good.pt"
        torch.save({"weights": torch.ones(100)}, good)
        odd = os.fsdecode(b"ckpt-\xff-5.pt")
        for name in (odd, f"ckpt-{2**64}.pt", "ckpt-7.pt"):
            shutil.copy(good, agent.checkpoints / name)
        wait_until(lambda: len(agent.log("checkpoint.committed")) == 2, 60, "all but one are committed")
        wait_until(lambda: bool(agent.log("watch.refused")), 60, "the odd one is named")
        (refused,) = agent.log("watch.refused")
        assert refused["hint"] == "rename the file or the directory"
        agent.terminate()
        assert agent.wait(60) == 0
        assert not agent.log("monitor.failed")
        assert len(agent.log("watch.refused")) == 1
    assert sorted(path.name for path in store.iterdir() if path.name != ".mooring") == [
        "ckpt-18446744073709551616.pt",
        "ckpt-7.pt",
    ]


LATE_PROGRAM = """
import os, signal, sys
from pathlib import Path
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # before there are threads, one of which would die of it
import torch
torch.save({"weights": torch.ones(100_000)}, sys.argv[1] + ".whole")
content = Path(sys.argv[1] + ".whole").read_bytes()
print("ready", flush=True)
signal.sigwait([signal.SIGTERM])
with open(sys.argv[1], "wb") as file:
    for start in range(0, len(content), len(content) // 10):
        file.write(content[start : start + len(content) // 10])
        file.flush()
        signal.sigtimedwait([signal.SIGUSR1], 0.1)
"""


def test_what_the_program_saves_when_both_are_told_to_end_is_committed_too(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with AgentProcess(tmp_path / "volume", f"file://{store}", grace_seconds=20) as agent:
        line = [sys.executable, "-c", LATE_PROGRAM, str(agent.checkpoints / "model-20.pt")]
        with subprocess.Popen(line, stdout=subprocess.PIPE) as program:
            try:
                assert program.stdout is not None
                assert program.stdout.readline() == b"ready\n"
                # It writes for a second; the agent is told meanwhile, or must find what is there already.
                program.send_signal(signal.SIGTERM)
                agent.terminate()
                assert program.wait(60) == 0
                assert agent.wait(60) == 0
            finally:
                program.kill()
        assert [line["name"] for line in agent.log("checkpoint.committed")] == ["model-20.pt"]
