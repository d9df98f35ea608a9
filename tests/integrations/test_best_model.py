"""What a restored state refers to is brought back with it: the best checkpoint, which is not the newest one."""

from pathlib import Path

import pytest
from tests.integrations.lives import Lives
from tests.lanes import nightly

PROGRAM = Path(__file__).with_name("best_model.py")


@pytest.mark.parametrize("framework", ["hugging_face", "lightning"])
@pytest.mark.parametrize("place", ["inside", *nightly("outside")])
def test_on_a_new_machine_training_ends_with_its_best_model(framework: str, place: str, tmp_path: Path) -> None:
    lives = Lives(tmp_path, framework, place, program=PROGRAM)
    expected = lives.alone(seen=("best ", "learned "))
    assert expected[0].startswith(("best checkpoint-2", "best epoch=0-step=2"))
    killed = lives.start(lives.command(), KILLED_AT="7")
    assert killed.returncode == 137, killed.stderr
    lives.lose_the_disk()
    resumed = lives.start(lives.command())
    assert resumed.returncode == 0, resumed.stderr
    assert [line for line in resumed.stdout.splitlines() if line.startswith(("best ", "learned "))] == expected, (
        lives.log
    )
    assert "cannot be had" not in lives.log
