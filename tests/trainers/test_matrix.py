"""Every trainer is stopped and loses nothing; where training is deterministic, not a bit differs.

Each of these stops is made with every other trainer, so that the matrix fits into a few minutes:

| notice             | moment                                                         | besides                       |
|--------------------|----------------------------------------------------------------|-------------------------------|
| SIGTERM to torchrun| the warm-up, before the optimizer's first step                 |                               |
| SIGTERM to rank 0  | a periodic save (fsdp2: it is written in the background)       |                               |
| SIGTERM to rank 1  | between a backward pass and its optimizer step (accumulation)  | twice in a row; under autoload|
| signal file alone  | an evaluation where the trainer has one, else between steps    |                               |

Lightning tries its validation before a run's first step, and rank 1 alone is told then too.

A trainer's jobs are one training run: each begins on an empty volume from what the one before it left in the bucket,
the last one trains to the end, and the whole is compared with one uninterrupted run. `make soak` stops every trainer
in all of these ways, and in all others, many times (see soak.py).
"""

from pathlib import Path

import pytest
from tests.servers.server import Bucket
from tests.trainers.chain import Chain
from tests.trainers.tensors import digests
from tests.trainers.trainers import STEPS, TRAINERS, Trainer

DAILY = ("ddp", "hugging_face", "lightning_trainer")
"""In `make test`; the others are in `make test-all`."""

pytestmark = [pytest.mark.trainers, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    ("number", "trainer"),
    [
        pytest.param(number, trainer, id=trainer.name, marks=[pytest.mark.nightly] * (trainer.name not in DAILY))
        for number, trainer in enumerate(TRAINERS)
    ],
)
def test_a_run_that_is_stopped_again_and_again_loses_nothing(
    number: int, trainer: Trainer, rclone_bucket: Bucket, tmp_path: Path
) -> None:
    chain = Chain(trainer, rclone_bucket, tmp_path)
    undisturbed = chain.train_undisturbed()
    expected = digests(chain.newest_checkpoint())
    for stop in trainer.stops[number % 2 :: 2]:
        chain.stop(stop)
    chain.finish()
    assert chain.step == STEPS
    assert list(chain.losses) == list(range(1, STEPS + 1)), "every step was trained once"
    if trainer.same_losses:
        assert chain.losses == undisturbed
    if trainer.same_tensors:
        assert digests(chain.newest_checkpoint()) == expected
