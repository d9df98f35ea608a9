"""Programs that never call us: what they write into a watched directory is kept safe, and comes back where it was."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.harness.agent_process import AgentProcess, json_lines, tree, wait_until, write_checkpoint
from tests.harness.bounds import HANG_SECONDS
from tests.harness.run_process import JUST_IN_TIME, RunProcess
from tests.harness.warm_python import keepstep

from keepstep_agent.adapters.output.mirror_state import read_base, write_base
from keepstep_api.names import AGENT_STATE_DIRECTORY, ENV_VOLUME

SAVE = """
import sys
from pathlib import Path
out = Path(sys.argv[1])
out.mkdir(exist_ok=True)
for name in sys.argv[2:]:
    (out / name).parent.mkdir(parents=True, exist_ok=True)
    (out / name).write_text(name * 100)
"""


class Place:
    """A folder with a destination, a volume and an output directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "out"
        self.volume = folder / "volume"
        self.store = folder / "store"

    def run(self, program: str, *arguments: str, code: int = 0) -> "subprocess.CompletedProcess[str]":
        line = [sys.executable, "-m", "keepstep_agent", "run", f"--to=file://{self.store}", f"--volume={self.volume}"]
        line += [f"--watch={self.out}", "--log-format=json", "--", sys.executable, "-c", program, str(self.out)]
        result = subprocess.run([*line, *arguments], capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
        assert result.returncode == code, result.stderr
        return result

    def lose_the_disk(self) -> None:
        shutil.rmtree(self.out, ignore_errors=True)
        shutil.rmtree(self.volume)

    def snapshots(self) -> list[str]:
        """The saves of the committed snapshots, the oldest first."""
        return [
            path.name.split(".")[1]
            for path in sorted((self.store / ".keepstep/snapshots/node-0").glob("*"), reverse=True)
        ]

    def sent(self, save: str) -> set[str]:
        """The files that are stored with a snapshot itself."""
        folder = self.store / "node-0" / save
        return {path for path in tree(folder) if not path.startswith(".keepstep/")}

    def restore(self) -> None:
        result = keepstep("restore", f"file://{self.store}", f"--volume={self.volume}", f"--watch={self.out}")
        assert result.returncode == 0, result.stderr


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_all_that_a_program_leaves_comes_back_where_it_was(place: Place) -> None:
    names = ("ckpt.pth.tar", "a/b/c/d/state", "model.keras.txt", "train.log", "final.bin")
    place.run(SAVE, *names)
    written = tree(place.out)
    times = {name: (place.out / name).stat().st_mtime_ns for name in names}
    place.lose_the_disk()
    place.restore()
    assert tree(place.out) == written
    assert {name: (place.out / name).stat().st_mtime_ns for name in names} == times


def test_only_what_has_changed_is_sent_after_a_restore_too(place: Place) -> None:
    place.run(SAVE, "step-1/model", "step-1/optim", "config.json")
    place.lose_the_disk()
    place.run(SAVE, "step-2/model")
    first, second = place.snapshots()
    assert place.sent(first) == {"out/step-1/model", "out/step-1/optim", "out/config.json"}
    assert place.sent(second) == {"out/step-2/model"}
    written = tree(place.out)
    place.lose_the_disk()
    place.restore()
    assert tree(place.out) == written
    assert len(written) == 4


def test_a_restored_run_that_writes_nothing_is_no_failure_and_no_news(place: Place) -> None:
    place.run(SAVE, "model")
    place.lose_the_disk()
    place.run("", code=0)
    assert len(place.snapshots()) == 1


def test_an_agent_after_an_interrupted_restore_sends_everything(place: Place) -> None:
    place.run(SAVE, "model")
    place.lose_the_disk()
    place.restore()
    # As a restore leaves it that was to put another snapshot in place.
    state = place.volume / ".keepstep" / AGENT_STATE_DIRECTORY
    write_base(place.volume, state, replace(read_base(place.volume, state), snapshot=None, pending=frozenset()))
    with AgentProcess(place.volume, f"file://{place.store}", watch=place.out) as agent:
        (place.out / "more").write_text("more")
        wait_until(lambda: bool(agent.log("checkpoint.committed")), HANG_SECONDS, "a snapshot is committed")
        agent.terminate()
        agent.wait(HANG_SECONDS)
    assert place.sent(place.snapshots()[-1]) == {"out/model", "out/more"}


REWRITE = """
import sys, time
from pathlib import Path
path = Path(sys.argv[1], "ckpt.pt")
path.parent.mkdir(exist_ok=True)
print("found", path.read_text() if path.exists() else "nothing", flush=True)
for content in sys.argv[2:]:
    path.write_text(content)
"""


@pytest.mark.nightly
def test_a_file_that_is_rewritten_in_place_is_sent_after_each_restore(place: Place) -> None:
    for life, found in enumerate(["nothing", "life 0", "life 1"]):
        result = place.run(REWRITE, f"life {life}")
        assert result.stdout == f"found {found}\n"
        place.lose_the_disk()
    assert len(place.snapshots()) == 3


WAIT = SAVE + 'print("saved", flush=True)\nimport signal\nsignal.pause()\n'


def test_a_snapshot_is_committed_while_its_program_goes_on(place: Place) -> None:
    command = (sys.executable, "-c", WAIT, str(place.out), "step-1/model")
    with RunProcess(place.volume, f"file://{place.store}", command=command, watch=place.out) as run:
        wait_until(lambda: len(place.snapshots()) == 1, HANG_SECONDS, "it is committed")
        assert run.process.poll() is None
        run.signal(signal.SIGTERM)
        assert run.wait() == 128 + signal.SIGTERM
    assert len(place.snapshots()) == 1


def test_what_is_announced_is_in_no_snapshot_and_what_lies_beside_it_is(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with AgentProcess(tmp_path / "volume", f"file://{store}") as agent:
        environment = {**os.environ, ENV_VOLUME: str(agent.volume)}
        subprocess.run([sys.executable, "-c", CLIENT], env=environment, check=True, timeout=HANG_SECONDS)
        source = write_checkpoint(agent.checkpoints / "by-call-20", {"state": 100})
        agent.wait_committed(agent.announce(source, 20, save="attempt-20").save)
        write_checkpoint(agent.checkpoints / "final", {"model.bin": 100})
        wait_until(lambda: bool(agent.log("snapshot.taken")), HANG_SECONDS, "a snapshot is taken")
        agent.terminate()
        assert agent.wait(HANG_SECONDS) == 0
    stored = {path.split("/", 2)[2] for path in tree(store / "node-0") if "/.keepstep/" not in f"/{path}"}
    assert {path for path in tree(store / "node-0") if path.endswith("model.bin")}
    assert not {path for path in stored if "by-call-20" in path or "checkpoint-10" in path}


def test_a_part_of_a_checkpoint_that_nobody_announced_is_in_no_snapshot_and_named(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with AgentProcess(tmp_path / "volume", f"file://{store}") as agent:
        announced = write_checkpoint(agent.checkpoints / "checkpoint-271", {"rank0": 100, "rank1": 100})
        agent.wait_committed(agent.announce(announced, 271, save="attempt-271").save)
        # One of its two programs was killed between its save and its announcement.
        write_checkpoint(agent.checkpoints / "checkpoint-205", {"rank0": 100})
        write_checkpoint(agent.checkpoints / "runs", {"config.json": 100})
        wait_until(lambda: bool(agent.log("snapshot.taken")), HANG_SECONDS, "a snapshot is taken")
        agent.terminate()
        agent.wait(HANG_SECONDS)
        assert "checkpoints/checkpoint-205: it looks like a checkpoint of those that are announced" in agent.log_text()
    assert not [path for path in tree(store / "node-0") if "checkpoint-205" in path]
    assert [path for path in tree(store / "node-0") if path.endswith("runs/config.json")]


CHANGED = """
import os, sys
from pathlib import Path
out = Path(sys.argv[1])
(out / "empty").mkdir(parents=True)
(out / "plain").write_text("plain")
(out / "run.sh").write_text("run")
(out / "run.sh").chmod(0o755)
(out / "again").hardlink_to(out / "plain")
with open(out / "sparse", "wb") as file:
    file.truncate(1024**2)
"""


def test_what_comes_back_changed_is_said_at_the_snapshot_once(place: Place) -> None:
    command = (sys.executable, "-c", CHANGED + "import signal; signal.pause()", str(place.out))
    with RunProcess(place.volume, f"file://{place.store}", command=command, watch=place.out) as run:
        wait_until(lambda: len(place.snapshots()) == 1, HANG_SECONDS, "it is committed")
        said = {line["such_as"]: line["comes_back"] for line in run.log("snapshot.comes_back_changed")}
        (place.out / "more.sh").write_text("run")
        (place.out / "more.sh").chmod(0o755)
        wait_until(lambda: len(place.snapshots()) == 2, HANG_SECONDS, "it is committed too")
        assert len(run.log("snapshot.comes_back_changed")) == len(said)
        run.signal(signal.SIGTERM)
        assert run.wait() == JUST_IN_TIME
    # Either of its two names may be seen first.
    said = {path.replace("again", "plain"): how for path, how in said.items()}
    assert said == {
        "out/empty": "not at all, as it is an empty folder",
        "out/run.sh": "without its mode",
        "out/plain": "as a file of its own, though it has another name here",
        "out/sparse": "without its holes, if it has any",
    }


CLIENT = """
import keepstep
checkpointer = keepstep.Checkpointer()
with checkpointer.save(10) as directory:
    (directory / "state").write_text("10")
"""


def test_a_file_cut_short_is_in_no_snapshot_and_the_last_lines_and_the_code_say_so(place: Place) -> None:
    program = "import sys; from pathlib import Path; out = Path(sys.argv[1]); out.mkdir();"
    program += "(out / 'model.safetensors').write_bytes(b'x'); (out / 'config').write_text('c')"
    result = place.run(program, code=75)
    assert "keepstep: not durable: out/model.safetensors: its format shows that it is not complete" in result.stderr
    (save,) = place.snapshots()
    assert place.sent(save) == {"out/config"}


READ = SAVE.replace("out.mkdir", "old = [path.read_text() for path in out.rglob('*') if path.is_file()]\nout.mkdir")


@pytest.mark.nightly
def test_a_program_that_ignores_what_was_restored_is_told_so_at_its_end(place: Place) -> None:
    place.run(SAVE, "step-1", "step-2")
    place.lose_the_disk()
    ignored = place.run(SAVE, "step-3")
    assert "keepstep: the program read none of the 2 files of the last snapshot in " in ignored.stderr
    place.lose_the_disk()
    read = place.run(READ, "step-4")
    assert "the program read none" not in read.stderr


def test_a_run_that_stored_nothing_says_so_and_its_code_too(place: Place) -> None:
    result = place.run("", code=75)
    assert (
        "not durable: nothing was stored: nothing was announced, and nothing that can be stored is in " in result.stderr
    )


def test_no_name_in_an_output_directory_ends_the_agent_or_hides_another(tmp_path: Path) -> None:
    with AgentProcess(tmp_path / "volume", f"file://{tmp_path}/store") as agent:
        odd = os.fsdecode(b"ckpt-\xff-5.pt")
        for name in (odd, "a\nb", "ckpt-7"):
            (agent.checkpoints / name).write_text("x")
        os.mkfifo(agent.checkpoints / "fifo")
        (agent.checkpoints / "away").symlink_to("/etc/passwd")
        wait_until(lambda: bool(agent.log("checkpoint.committed")), HANG_SECONDS, "it is committed")
        assert len(agent.status().not_stored) == 3
        agent.terminate()
        assert agent.wait(HANG_SECONDS) == 75
        assert not agent.log("monitor.failed")
    assert [path for path in tree(tmp_path / "store/node-0") if path.endswith("ckpt-7")]


LATE_PROGRAM = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print("ready", flush=True)
signal.sigwait([signal.SIGTERM])
with open(sys.argv[1], "wb") as file:
    for _ in range(10):
        file.write(b"x" * 1000)
        file.flush()
        signal.sigtimedwait([signal.SIGUSR1], 0.1)
"""


def test_what_the_program_saves_when_both_are_told_to_end_is_committed_too(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with AgentProcess(tmp_path / "volume", f"file://{store}", grace_seconds=600) as agent:
        line = [sys.executable, "-c", LATE_PROGRAM, str(agent.checkpoints / "model-20")]
        with subprocess.Popen(line, stdout=subprocess.PIPE) as program:
            try:
                assert program.stdout is not None
                assert program.stdout.readline() == b"ready\n"
                # It writes for a second; the agent is told meanwhile, or must find what is there already.
                program.send_signal(signal.SIGTERM)
                agent.terminate()
                assert program.wait(HANG_SECONDS) == 0
                assert agent.wait(HANG_SECONDS) == 0
            finally:
                program.kill()
    (path,) = (store / "node-0").rglob("model-20")
    assert path.stat().st_size == 10_000


def test_a_restarted_agent_sends_nothing_again(tmp_path: Path) -> None:
    with AgentProcess(tmp_path / "volume", f"file://{tmp_path}/store") as agent:
        (agent.checkpoints / "one").write_text("1")
        wait_until(lambda: base_is_stored(tmp_path / "volume"), HANG_SECONDS, "the first is the base of the next")
        agent.kill()
        agent.start()
        (agent.checkpoints / "two").write_text("2")
        wait_until(lambda: len(agent.log("snapshot.taken")) == 2, HANG_SECONDS, "the second is taken")
        assert [(line["sent"], line["kept"]) for line in agent.log("snapshot.taken")] == [(1, 0), (1, 1)]


def base_is_stored(volume: Path) -> bool:
    bases = list(volume.rglob("mirror.json"))
    return bool(bases) and json.loads(bases[0].read_text())["snapshot"] is not None


def test_a_killed_agent_goes_on_with_the_snapshot_that_was_on_its_way(tmp_path: Path) -> None:
    with AgentProcess(tmp_path / "volume", f"file://{tmp_path}/store", bandwidth_bytes_per_second=1000) as agent:
        (agent.checkpoints / "large").write_bytes(bytes(1_000_000))
        wait_until(lambda: bool(agent.log("checkpoint.staged")), HANG_SECONDS, "it is pinned")
        agent.kill()
        (agent.checkpoints / "large").unlink()
    with AgentProcess(tmp_path / "volume", f"file://{tmp_path}/store") as agent:
        wait_until(lambda: bool(agent.log("checkpoint.committed")), HANG_SECONDS, "it is committed")
    (stored,) = (tmp_path / "store/node-0").rglob("large")
    assert stored.stat().st_size == 1_000_000


TWO_FILES = """
import os, signal, sys, time
from pathlib import Path
out = Path(sys.argv[1])
out.mkdir(exist_ok=True)
def save(name, step):
    header = b'{"w":{"dtype":"U8","shape":[400000],"data_offsets":[0,400000]}}'
    (out / name).write_bytes(len(header).to_bytes(8, "little") + header + bytes([step]) * 400_000)
for step in (1, 2, 3):
    for name in ("model.safetensors", "optimizer.safetensors"):
        save(name, step)
        if step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
    while not (out.parent / f"go-{step}").exists():
        time.sleep(0.02)
"""


def test_a_kill_while_a_snapshot_is_on_its_way_mixes_no_two_saves(place: Place) -> None:
    command = (sys.executable, "-c", TWO_FILES, str(place.out))
    with RunProcess(
        place.volume,
        f"file://{place.store}",
        command=command,
        watch=place.out,
        bandwidth_bytes_per_second=100_000,
    ) as run:
        wait_until(lambda: len(place.snapshots()) == 1, HANG_SECONDS, "the first save is stored")
        (place.folder / "go-1").touch()
        wait_until(lambda: len(run.log("checkpoint.staged")) == 2, HANG_SECONDS, "the second one is on its way")
        (place.folder / "go-2").touch()
        assert run.wait() == 128 + signal.SIGKILL
    place.lose_the_disk()
    place.restore()
    steps = {path.name: path.read_bytes()[-1] for path in place.out.iterdir()}
    assert steps == {"model.safetensors": 2, "optimizer.safetensors": 2}


def test_ls_and_verify_show_snapshots(place: Place) -> None:
    place.run(SAVE, "model")
    listed = keepstep("ls", f"file://{place.store}", "--json")
    (row,) = json.loads(listed.stdout)["snapshots"]
    assert (row["series"], row["file_count"], row["problem"]) == ("node-0", 1, "")
    verified = keepstep("verify", f"file://{place.store}")
    assert verified.returncode == 0
    assert "every byte is as it was written" in verified.stdout
    assert json_lines(verified.stderr) == []


@pytest.mark.nightly
def test_a_signal_after_the_programs_end_limits_the_wait_for_a_snapshot_on_its_way(place: Place) -> None:
    large = "import sys, time; from pathlib import Path; out = Path(sys.argv[1]); out.mkdir(exist_ok=True);"
    large += "(out / 'large').write_bytes(bytes(50_000_000)); go = out.parent / 'go'\n"
    large += "while not go.exists(): time.sleep(0.02)\n(out / 'late').write_text('late')"
    command = (sys.executable, "-c", large, str(place.out))
    with RunProcess(
        place.volume,
        f"file://{place.store}",
        command=command,
        watch=place.out,
        bandwidth_bytes_per_second=1000,
        grace_seconds=600,
    ) as run:
        wait_until(lambda: len(run.log("checkpoint.staged")) == 1, HANG_SECONDS, "the large one is on its way")
        (place.folder / "go").touch()
        wait_until(lambda: list(run.children()) == [run.agent_pid()], HANG_SECONDS, "the program has ended")
        run.signal(signal.SIGTERM)
        run.wait()
    # The notice lifts the cap, so that all is stored in time.
    assert [path.name for path in (place.store / "node-0").rglob("late")] == ["late"]
