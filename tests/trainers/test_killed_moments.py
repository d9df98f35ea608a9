"""Every framework's trainer is ended at each moment of a save, and goes on from a whole checkpoint.

Its framework goes on from there without Keepstep too. `make soak` does the same with two ranks.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, assert_never

import pytest
from tests.harness.bounds import HANG_SECONDS
from tests.lanes import nightly
from tests.trainers.job import LIBRARIES
from tests.trainers.life import Life, newest_whole
from tests.trainers.save_moments import BEHIND, Moment, Way

STEPS: Final = 24
"""More than the lives of a test get to."""
COMPLETE: Final = (Moment.COMPLETE, Moment.NAMED)
RECORDED: Final = (Moment.RECORDED, Moment.ANNOUNCED)
SOAK: Final = "KEEPSTEP_RANDOM_ENDS" in os.environ
"""It takes ten minutes."""
RANDOM_ALONE: Final = ("lightning_trainer",)
"""It does not restore its random generators."""
ONE_FILE: Final = ("lightning_trainer",)
"""Whose checkpoint is one file."""

pytestmark = [pytest.mark.trainers, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("trainer", ["hugging_face", *nightly(*sorted(LIBRARIES.keys() - {"hugging_face"}))])
@pytest.mark.parametrize("ranks", [1, 2] if SOAK else [1])
@pytest.mark.parametrize("asynchronous", [True, *nightly(False)])
def test_ended_at_a_moment_of_a_save_it_goes_on_from_a_whole_checkpoint(
    trainer: str, ranks: int, asynchronous: bool, tmp_path: Path
) -> None:
    undisturbed = Life(trainer, tmp_path / "undisturbed", tmp_path / "undisturbed-volume", ranks, steps=STEPS)
    assert undisturbed.wait() == [0] * ranks, undisturbed.output()
    expected = undisturbed.losses

    for moment in Moment:
        if (moment is Moment.SOME_FILES and trainer in ONE_FILE) or (moment in BEHIND and not asynchronous):
            continue
        folder = tmp_path / moment
        volume = folder / "volume"
        allowed = {0}
        # What a kill leaves is there when the framework begins alone.
        for way in (Way.NOTICE, Way.EXCEPTION, Way.KILL):
            life = Life(
                trainer,
                folder / way,
                volume,
                ranks,
                steps=STEPS,
                moment=moment,
                way=way,
                asynchronous=asynchronous,
            )
            life.wait_any(HANG_SECONDS)
            if way is Way.NOTICE:
                life.wait()
            else:
                life.kill()
            after = check_losses(life, expected, allowed)
            # It saves at even steps, and is ended in its second save.
            allowed = may_go_on_after(moment, way, saved=(after // 2 + 2) * 2, volume=volume)
            assert allowed, f"{way} {moment}\n{life.output()}"

        alone = Life(trainer, folder / "alone", volume, ranks, steps=STEPS, alone=True)
        assert alone.wait() == [0] * ranks, alone.output()
        if moment is Moment.COMPLETE:
            # Without Keepstep nothing gives the complete checkpoint its name.
            allowed |= {step - 2 for step in allowed}
        check_losses(alone, expected, allowed, same=trainer not in RANDOM_ALONE)


def check_losses(life: Life, expected: Sequence[tuple[int, str]], allowed: set[int], *, same: bool = True) -> int:
    """Return the step after which it began: one of these."""
    losses = life.losses
    assert losses, life.output()
    assert losses[0][0] - 1 in allowed, f"allowed={allowed}\n{life.output()}"
    first = next(index for index, (step, _) in enumerate(expected) if step == losses[0][0])
    there = expected[first : first + len(losses)]
    assert [step for step, _ in losses] == [step for step, _ in there], life.output()
    assert losses == there or not same, life.output()
    return losses[0][0] - 1


def may_go_on_after(moment: Moment, way: Way, *, saved: int, volume: Path) -> set[int]:
    """Return the steps after which the next life may begin; none if what is there is wrong."""
    recorded = newest_whole(volume)
    match way:
        case Way.NOTICE:
            return {recorded} if recorded >= saved else set()
        case Way.EXCEPTION:
            # Python ends its threads in order, and the checkpoint may still get there.
            return {recorded, saved} if recorded in (saved - 2, saved) else set()
        case Way.KILL if moment in RECORDED:
            return {recorded} & {saved}
        case Way.KILL if moment in COMPLETE:
            # The next start gives it its name and its record.
            return {saved} if recorded == saved - 2 else set()
        case Way.KILL:
            return {recorded} & {saved - 2}
        case _:
            assert_never(way)
