"""ckpt-chaos kills each framework's saves at their file operations: every program goes on, and with the right weights.

ckpt-chaos is somebody else's, from PyPI. It kills the program before or in one of its file operations, be it the
framework's or ours. The program is then started again, with its disk or without. Nothing may be lost that the framework
alone does not lose.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.foreign.chaos_launcher import HIDDEN
from tests.foreign.downloads import installed_into

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(5400)]
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
POINTS = 18
SECONDS = 2600
NAMES = {
    "hugging_face": "checkpoint-*",
    "lightning": "epoch=*-step=*.ckpt",
    "accelerate": "step-*",
    "dcp": "step-*",
}


@pytest.fixture(scope="module")
def chaos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed_into(tmp_path_factory.mktemp("ckpt-chaos"), "ckpt-chaos==0.1.8")


@pytest.mark.parametrize("framework", list(NAMES))
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("keeps_disk", [True, False], ids=["disk kept", "disk lost"])
def test_no_kill_costs_what_the_framework_alone_keeps(
    framework: str, ranks: int, keeps_disk: bool, chaos: Path
) -> None:
    if find_spec({"hugging_face": "transformers", "dcp": "torch"}.get(framework, framework)) is None:
        pytest.skip(f"{framework} is not installed")
    launch = (str(HERE / "chaos_launcher.py"), str(ranks), str(HERE / "chaos_program.py"), framework)
    words = (sys.executable, *launch, "{out}/v/checkpoints")
    kept = (sys.executable, "-m", "keepstep_agent", "run", "--to", "file://{out}/store", "--volume", "{out}/v")
    judged = judge(chaos, framework, (*kept, "--autoload", "--", *words), keeps_disk=keeps_disk)
    assert judged["PASS"] > POINTS / 2, judged
    assert set(judged) <= {"PASS", "LOST_WORK"}, judged
    if judged["LOST_WORK"] and keeps_disk:
        assert judge(chaos, framework, words, keeps_disk=True)["LOST_WORK"], judged


def judge(chaos: Path, framework: str, words: Sequence[str], *, keeps_disk: bool) -> "Counter[str]":
    """Return how often ckpt-chaos gave each verdict."""
    hide = f"{HIDDEN}=$CKPT_CHAOS_WATCH; export {HIDDEN}; unset CKPT_CHAOS_WATCH; "
    first = f"{hide}cd {ROOT}; exec {' '.join(words)}"
    again = first if keeps_disk else f"rm -rf {{out}}/v; {first}"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KEEPSTEP_")}
    # A short name: sockets lie below it.
    with tempfile.TemporaryDirectory(prefix="chaos-") as work:
        command = (
            *(sys.executable, "-m", "ckpt_chaos", "run", "--work", f"{work}/w"),
            *("--max-points", str(POINTS), "--jobs", "2", "--modes", "before,torn,unsynced"),
            # Some files have the path of the checkpoint in them.
            "--ckpt-ignore-size",
            *("--resume-cmd", f"sh -c '{again}'", "--step-regex", r"begins with step (\d+)"),
            *("--result-file", "{out}/v/final0.pt", "--checkpoint-glob", f"{{out}}/v/checkpoints/{NAMES[framework]}"),
            *("--", "sh", "-c", first),
        )
        ended = subprocess.run(
            command, cwd=chaos, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    print(ended.stdout, ended.stderr[-3000:])
    counts = re.findall(r"([A-Z_]+): (\d+)", (ended.stdout.splitlines() or [""])[-1])
    return Counter({verdict: int(count) for verdict, count in counts})
