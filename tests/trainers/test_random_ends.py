"""Every framework's trainer is ended at random, and always goes on from its newest whole checkpoint.

It saves at every second step, so that most ends come while a checkpoint is copied, written, named or recorded. It is
ended by SIGKILL, by SIGTERM, which SIGKILL follows at times, and by an exception. In a third of its lives it looks at
what it saves, by callbacks, by a `torch.save` of its own and by second loads. There is no agent: its part is tested
elsewhere.
`make soak` ends each two hundred times, which takes a quarter of an hour.
"""

import os
import random
import signal
import time
from pathlib import Path
from typing import Final

import pytest
from tests.trainers.job import LIBRARIES
from tests.trainers.life import Life, newest_whole

ENDS: Final = int(os.environ.get("KEEPSTEP_RANDOM_ENDS", "24"))
"""Of each framework; of four, one is with two ranks."""
STEPS: Final = 60
"""Of a whole training. When it has ended by itself, the next begins on an empty volume."""
LONGEST_SECONDS: Final = 1.2
"""From the first step to the end of a life."""

pytestmark = [pytest.mark.nightly, pytest.mark.trainers, pytest.mark.timeout(3000)]


def end(life: Life, ranks: int, chance: random.Random) -> None:
    """End it, one way or another."""
    way = chance.choices(("kill", "notice", "notice and kill", "exception"), weights=(10, 3, 3, 2))[0]
    rank = chance.randrange(ranks)
    if way == "exception":
        # In some places, such as a finalizer, Python ignores it.
        life.send_signal(signal.SIGUSR1, rank)
        life.wait_any(LONGEST_SECONDS)
    elif way != "kill":
        life.send_signal(signal.SIGTERM, rank)
    if way == "notice":
        life.wait()
        return
    if way == "notice and kill":
        time.sleep(chance.uniform(0, 0.2))
    life.kill()


@pytest.mark.parametrize("trainer", list(LIBRARIES))
@pytest.mark.parametrize(("ranks", "ends"), [(1, ENDS - ENDS // 4), (2, ENDS // 4)], ids=["alone", "two"])
def test_ended_at_any_moment_it_goes_on_from_its_newest_whole_checkpoint(
    trainer: str, ranks: int, ends: int, tmp_path: Path
) -> None:
    undisturbed = Life(trainer, tmp_path / "undisturbed", tmp_path / "volume", ranks, steps=STEPS)
    assert undisturbed.wait() == [0] * ranks, undisturbed.output()
    expected = undisturbed.losses
    looking = Life(
        trainer, tmp_path / "looking", tmp_path / "volume-looking", ranks, steps=STEPS, asynchronous=None, looks=True
    )
    assert looking.wait() == [0] * ranks, looking.output()
    assert looking.losses == expected
    assert "looked" in looking.output()

    seed = random.randrange(1 << 32)
    print(f"seed={seed}")
    chance = random.Random(seed)
    volume = tmp_path / "volume-0"
    for number in range(ends):
        begins_after = newest_whole(volume)
        if begins_after == STEPS:
            volume, begins_after = tmp_path / f"volume-{number}", 0
        # One that looks leaves it to the default.
        asynchronous = chance.choice((True, False, None))
        looks = asynchronous is None
        folder = tmp_path / f"life-{number}"
        life = Life(trainer, folder, volume, ranks, steps=STEPS, asynchronous=asynchronous, looks=looks)
        life.wait_training()
        time.sleep(chance.uniform(0, LONGEST_SECONDS))
        end(life, ranks, chance)
        losses = life.losses
        # A checkpoint may have its name, and no record yet.
        begins_after = max(begins_after, losses[0][0] - 1) if losses else begins_after
        first = next(index for index, (step, _) in enumerate(expected) if step == begins_after + 1)
        assert losses == expected[first : first + len(losses)], f"after step {begins_after}\n{life.output()}"
