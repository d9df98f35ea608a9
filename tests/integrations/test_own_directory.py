"""A program that looks in its own directory outside the volume finds there what the last start has stored."""

from pathlib import Path

import pytest
from tests.integrations.lives import Lives
from tests.lanes import nightly

PROGRAM = Path(__file__).with_name("own_directory_program.py")


@pytest.mark.parametrize("framework", ["accelerate", *nightly("deepspeed")])
@pytest.mark.parametrize("keeps_disk", [False, True], ids=["on a new disk", "on the same disk"])
@pytest.mark.parametrize("output", ["relative", "absolute"])
def test_it_goes_on_at_the_step_that_was_stored(framework: str, output: str, keeps_disk: bool, tmp_path: Path) -> None:
    place = "outside" if output == "relative" else str(tmp_path / "w" / "o")
    lives = Lives(tmp_path, framework, place, program=PROGRAM)
    first = lives.start(lives.command())
    assert first.returncode == 143, first.stderr
    assert _begun_at(first.stdout) == 0
    if not keeps_disk:
        lives.lose_the_disk()
    second = lives.start(lives.command())
    assert second.returncode == 0, second.stderr
    assert _begun_at(second.stdout) == 4, second.stderr
    assert "keepstep: step 4 is back in " in second.stderr
    third = lives.start(lives.command())
    assert _begun_at(third.stdout) == 6, third.stderr


def test_where_nothing_can_be_linked_a_line_says_where_the_checkpoint_is(
    other_filesystem: Path, tmp_path: Path
) -> None:
    lives = Lives(tmp_path, "accelerate", str(other_filesystem / "o"), program=PROGRAM)
    first = lives.start(lives.command())
    assert first.returncode == 143, first.stderr
    second = lives.start(lives.command())
    assert f"and not in {other_filesystem}/o: it cannot be linked there" in second.stderr
    # What the program itself has saved.
    assert _begun_at(second.stdout) == 3, second.stderr


def _begun_at(output: str) -> int:
    (line,) = [line for line in output.splitlines() if line.startswith("begins at ")]
    return int(line.removeprefix("begins at "))
