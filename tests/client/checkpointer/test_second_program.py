"""Two programs of one run, each with a Checkpointer: the second one does not take the first one's state for its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.harness.bounds import HANG_SECONDS

from keepstep_api import names

PROGRAM = """
import sys
import keepstep

name = {"": None}.get(sys.argv[1], sys.argv[1])
checkpointer = keepstep.Checkpointer(name=name)
found = checkpointer.resume()
print("resumed", None if found is None else found.relative_to(sys.argv[2]))
with checkpointer.save(7, kind="final") as directory:
    (directory / "state").write_text(sys.argv[0])
if sys.argv[3] == "stays":
    print("saved", flush=True)
    sys.stdin.read()
if sys.argv[3] == "ends":
    checkpointer.finish()
"""


def begin(
    volume: Path, program: str, *, name: str = "", start: str = "one", ends: str = "ends"
) -> "subprocess.Popen[str]":
    path = volume.parent / program
    path.write_text(PROGRAM)
    environment = {**os.environ, names.ENV_VOLUME: str(volume), names.ENV_START: start}
    words = [sys.executable, str(path), name, str(volume), ends]
    pipe = subprocess.PIPE
    return subprocess.Popen(words, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def run(volume: Path, program: str, *, name: str = "", start: str = "one", ends: str = "ends") -> str:
    with begin(volume, program, name=name, start=start, ends=ends) as ended:
        output, errors = ended.communicate(timeout=HANG_SECONDS)
    return output.strip() or errors


def test_the_second_one_is_refused_with_a_hint(tmp_path: Path) -> None:
    assert run(tmp_path / "v", "a.py") == "resumed None"
    refused = run(tmp_path / "v", "b.py")
    assert "another training of this run saves in" in refused
    assert "Checkpointer(name=…)" in refused


def test_the_second_one_is_refused_while_the_first_still_trains_and_not_when_it_was_killed(tmp_path: Path) -> None:
    with begin(tmp_path / "v", "a.py", ends="stays") as first:
        assert first.stdout is not None
        assert [first.stdout.readline() for _ in range(2)] == ["resumed None\n", "saved\n"]
        assert "another training of this run saves in" in run(tmp_path / "v", "b.py")
        assert run(tmp_path / "v", "b.py", name="b") == "resumed None"
        first.kill()
    assert run(tmp_path / "v", "b.py") == "resumed checkpoints/checkpoint-7"


def test_with_a_name_each_resumes_from_its_own(tmp_path: Path) -> None:
    for program in ("a", "b"):
        assert run(tmp_path / "v", f"{program}.py", name=program) == "resumed None"
    for program in ("a", "b"):
        assert (
            run(tmp_path / "v", f"{program}.py", name=program, start="two")
            == f"resumed checkpoints/{program}/checkpoint-7"
        )


@pytest.mark.parametrize(
    ("start", "program", "ends"),
    [("two", "a.py", "ends"), ("two", "b.py", "ends"), ("one", "a.py", "ends"), ("one", "b.py", "is killed")],
    ids=["a later start", "renamed for a later start", "started again by its launcher", "the first one has not ended"],
)
def test_who_goes_on_with_the_training_resumes(start: str, program: str, ends: str, tmp_path: Path) -> None:
    run(tmp_path / "v", "a.py", ends=ends)
    assert run(tmp_path / "v", program, start=start) == "resumed checkpoints/checkpoint-7"
