"""Every file that restore and agent open, as the kernel sees it, also those of libraries in C: what the webhook keeps a
trainer's volume away from, the volumes that it mounts itself, and the kernel's own files. strace sees it all.
"""

import os
import re
import site
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from shutil import which

import pytest
from tests.harness.agent_process import AgentProcess, tree, write_checkpoint
from tests.harness.bounds import HANG_SECONDS
from tests.servers.server import ACCESS_KEY, SECRET_KEY, Bucket

from keepstep_agent.core.injection.containers import AGENT_FILES
from keepstep_agent.core.injection.pod_fitness import IN_OUR_IMAGE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(which("strace") is None, reason="strace is not installed: apt install strace"),
]

KERNEL = ("/proc", "/sys", "/dev/null", "/dev/urandom", "/dev/shm")
OPENED = re.compile(r'^\d+ +(?:open|openat|openat2|creat|execve|execveat)\((?:\w+<(?P<at>.*?)>, )?"(?P<path>.*?)"')
RESUMED = re.compile(r"<\.\.\. (?:open|openat|openat2|creat|execve|execveat) resumed>")
LED_TO = re.compile(r"= \d+<(?P<path>/.*)>$")


def opened(trace: Path) -> Iterator[Path]:
    """Yield each path by which something was opened, or was to be, and where the kernel found it."""
    for line in trace.read_text(errors="replace").splitlines():
        asked = OPENED.match(line)
        if asked:
            yield Path(os.path.normpath(Path(asked["at"] or "/") / asked["path"]))
        if (asked or RESUMED.search(line)) and (found := LED_TO.search(line)):
            yield Path(found["path"])


def python_itself() -> set[Path]:
    """Of this machine's Python what is below /opt/keepstep and /usr/lib in the image."""
    places = {*site.getsitepackages(), sys.prefix, sys.base_prefix, *sys.path, str(Path(sys.executable).parent)}
    found = {Path(place) for place in places if place}
    return found | {path.resolve() for path in found}


def test_restore_and_agent_open_no_file_where_a_trainer_may_have_put_it(
    rclone_tls_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, work, secret, trace = (tmp_path / name for name in ("home", "work", "secret", "trace"))
    for folder in (home, work, secret):
        folder.mkdir()
    (secret / "AWS_ACCESS_KEY_ID").write_text(ACCESS_KEY)
    (secret / "AWS_SECRET_ACCESS_KEY").write_text(SECRET_KEY)
    traced = tmp_path / "traced-python"
    # -P: the image's command has no working directory on sys.path either. -D: the agent is our child, strace is not.
    traced.write_text(
        f'#!/bin/sh\nexec strace -D -f -qq -y -s 4096 -e trace=%file -A -o {trace} {sys.executable} -P "$@"\n'
    )
    traced.chmod(0o755)
    for name in [*os.environ]:
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    environment = {
        **AGENT_FILES,
        "HOME": str(home),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "KEEPSTEP_S3_ENDPOINT_URL": rclone_tls_bucket.endpoint_url,
        "KEEPSTEP_S3_CA_BUNDLE": str(rclone_tls_bucket.ca_bundle),
        "KEEPSTEP_S3_CREDENTIALS_DIRECTORY": str(secret),
    }
    monkeypatch.chdir(work)
    monkeypatch.setattr(sys, "executable", str(traced))
    with AgentProcess(
        tmp_path / "volume",
        rclone_tls_bucket.destination,
        environment=environment,
        warm=False,
        state_directory=tmp_path / "state",
    ) as agent:
        saved = write_checkpoint(agent.checkpoints / "checkpoint-1", {"model.bin": 6_000_000, "config.json": 30})
        agent.wait_committed(agent.announce(saved, 1).save)
        agent.terminate()
        agent.wait(HANG_SECONDS)
    line = [str(traced), "-m", "keepstep_agent", "restore", rclone_tls_bucket.destination]
    line += [f"--volume={tmp_path / 'other'}", f"--state-directory={tmp_path / 'other-state'}"]
    done = subprocess.run(
        line, env={**os.environ, **environment}, capture_output=True, text=True, timeout=HANG_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    assert tree(tmp_path / "other/checkpoints/checkpoint-1") == tree(saved)

    mounted = [tmp_path / name for name in ("volume", "state", "secret", "other", "other-state")]
    mounted.append(Path(str(rclone_tls_bucket.ca_bundle)))
    allowed = [Path(place) for place in (*IN_OUR_IMAGE, *KERNEL)] + [*python_itself(), *mounted]
    found = set(opened(trace))
    assert secret / "AWS_SECRET_ACCESS_KEY" in found, "the trace shows what is read"
    above = {parent for place in mounted for parent in place.parents}
    others = {path for path in found - above if not any(path.is_relative_to(place) for place in allowed)}
    assert others == {traced} & found
    text = trace.read_text(errors="replace")
    assert f'"{home}' not in text, "nothing is even looked for there"
    assert f'"{work}' not in text
