"""Stopped at any moment, Lightning's Trainer goes on where it was. Several ranks: tests/trainers."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.client.agent_server import AgentServer
from tests.integrations.lightning_trainer.training import (
    BY_EPOCH,
    EPOCH,
    JUST_IN_TIME,
    PERIODIC,
    RELEASE,
    STEPS,
    At,
    Model,
    announced,
    fit,
    fit_unfinished,
    make,
    steps,
    stop,
    terminate,
    torch,
    weights,
)
from tests.lanes import nightly

from keepstep import protect

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Model]:
    """A training with these arguments that was never stopped, and has no Keepstep."""
    trained: dict[str, Model] = {}

    def train_once(**arguments: Any) -> Model:
        key = repr(arguments)
        if key not in trained:
            trainer = make(tmp_path_factory.mktemp("undisturbed"), **arguments)
            trained[key] = Model(plateau=not arguments)
            fit_unfinished(trainer, trained[key])
        return trained[key]

    return train_once


@pytest.mark.parametrize(
    ("moment", "stopped_at", "arguments"),
    [
        pytest.param(("on_sanity_check_start", 0), 1, {}, id="the sanity check"),
        pytest.param(("on_train_start", 0), 1, {}, id="the warm-up"),
        pytest.param(("on_train_batch_start", 2), 3, {}, id="between steps"),
        pytest.param(("on_train_batch_end", 4, 1), 5, {"accumulate_grad_batches": 3}, id="an accumulation"),
        pytest.param(("on_save_checkpoint", 4), 4, {}, id="a periodic save"),
        pytest.param(("on_train_batch_end", 5), 5, {}, id="a step that is validated"),
        pytest.param(("on_validation_batch_end", 5, 1), 5, {}, id="a validation"),
        pytest.param(("on_validation_end", 5), 6, {}, id="the end of a validation"),
        pytest.param(("on_train_batch_end", 13), 13, {}, id="a later epoch"),
        pytest.param(("on_train_batch_end", EPOCH), EPOCH, {"val_check_interval": 7}, id="the last step of an epoch"),
        pytest.param(("on_train_epoch_start", EPOCH), EPOCH + 1, {}, id="between epochs"),
        pytest.param(("on_train_batch_end", EPOCH), EPOCH, BY_EPOCH, id="the last step of a validated epoch"),
        pytest.param(("on_validation_batch_end", EPOCH, 2), EPOCH, BY_EPOCH, id="the validation of an epoch"),
        pytest.param(("on_train_batch_end", 7), 7, {"every": 0}, id="a training that saves nothing"),
    ],
)  # fmt: skip
def test_stopped_at_any_moment_it_resumes_there_and_nothing_differs(
    moment: tuple[Any, ...],
    stopped_at: int,
    arguments: dict[str, Any],
    agent: AgentServer,
    volume: Path,
    undisturbed: Callable[..., Model],
    caplog: pytest.LogCaptureFixture,
) -> None:
    hook, step, *after = moment
    # Of metrics that a scheduler looks at later than the validation that made them Lightning saves nothing.
    plateau = not arguments
    trainer = make(volume / "checkpoints", At(hook, step, terminate, after=sum(after)), **arguments)
    stopped = stop(trainer, plateau=plateau)
    assert announced(agent)[-1] == (stopped_at, JUST_IN_TIME)
    assert agent.requests("NotifyTermination")

    caplog.clear()
    trainer = make(volume / "checkpoints", **arguments)
    resumed = fit(trainer, plateau=plateau)
    assert trainer.global_step == STEPS
    says_what_differs = "skips what is due at its end" in caplog.text
    if says_what_differs and RELEASE < (2, 5):
        return
    assert not says_what_differs
    expected = undisturbed(**arguments)
    assert stopped.computed + resumed.computed == expected.computed
    assert weights(resumed) == weights(expected)


def fail() -> None:
    raise RuntimeError("fails at that step")


class Stream(torch.utils.data.IterableDataset):  # type: ignore[misc]
    """Without a length, and in an order of its own in each epoch."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        first, every = (0, 1) if worker is None else (worker.id, worker.num_workers)
        order = torch.randperm(len(self._data), generator=torch.Generator().manual_seed(3)).tolist()
        return iter([self._data[index] for index in order[first::every]])


PLAIN: dict[str, Callable[[Any], Any]] = {
    "in order": lambda data: torch.utils.data.DataLoader(data, batch_size=8),
    "shuffled": lambda data: torch.utils.data.DataLoader(data, batch_size=8, shuffle=True),
    "by workers": lambda data: torch.utils.data.DataLoader(data, batch_size=8, shuffle=True, num_workers=2),
    "by workers that stay": lambda data: torch.utils.data.DataLoader(
        data, batch_size=8, shuffle=True, num_workers=2, persistent_workers=True
    ),
    "by a generator": lambda data: torch.utils.data.DataLoader(
        data, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
    "a stream": lambda data: torch.utils.data.DataLoader(Stream(data), batch_size=8),
    "a stream by workers": lambda data: torch.utils.data.DataLoader(Stream(data), batch_size=8, num_workers=2),
}


@pytest.mark.parametrize("end", ["stopped", *nightly("failed")])
@pytest.mark.parametrize("step", [EPOCH, 2 * EPOCH + 3, *nightly(7, 13)])
@pytest.mark.parametrize("order", PLAIN)
def test_a_loader_without_a_state_goes_on_with_the_data_that_are_left(
    order: str, step: int, end: str, agent: AgentServer, volume: Path, tmp_path: Path
) -> None:
    arguments = {"max_steps": STEPS + 2}
    alone = make(tmp_path / "undisturbed", **arguments)
    expected = Model()
    fit_unfinished(alone, expected, loader=PLAIN[order])
    if end == "stopped":
        made = make(volume / "checkpoints", At("on_train_batch_end", step, terminate), **arguments)
        computed = stop(made, loader=PLAIN[order]).computed
    else:
        made, model = make(volume / "checkpoints", At("on_train_batch_end", step, fail), **arguments), Model()
        with pytest.raises(RuntimeError, match="fails at that step"):
            fit_unfinished(protect(made), model, loader=PLAIN[order])
        computed = [one for one in model.computed if one[2 if one[0] == "train" else -1] < step // 4 * 4]
    resumed = fit(make(volume / "checkpoints", **arguments), loader=PLAIN[order])
    losses = [one[:4] for one in (*computed, *resumed.computed) if one[0] == "train"]
    assert losses == [one[:4] for one in expected.computed if one[0] == "train"]
    assert weights(resumed) == weights(expected)


class Numbers(torch.utils.data.Sampler):  # type: ignore[misc]
    """Has a generator that is none of torch's."""

    def __init__(self, data: Any) -> None:
        self.generator = np.random.RandomState(0)
        self._count = len(data)

    def __iter__(self) -> Iterator[int]:
        return iter(self.generator.permutation(self._count).tolist())

    def __len__(self) -> int:
        return self._count


def test_a_sampler_with_a_generator_of_another_library_saves_and_resumes(agent: AgentServer, volume: Path) -> None:
    def loader(data: Any) -> Any:
        return torch.utils.data.DataLoader(data, batch_size=8, sampler=Numbers(data))

    stop(make(volume / "checkpoints", At("on_train_batch_end", 7, terminate)), loader=loader)
    assert announced(agent)[-1] == (7, JUST_IN_TIME)
    assert steps(fit(make(volume / "checkpoints", max_steps=9), loader=loader)) == [8, 9]


def test_in_the_midst_of_an_accumulation_no_step_is_saved_once_more(agent: AgentServer, volume: Path) -> None:
    arguments = {"every": 2, "accumulate_grad_batches": 3}
    stop(make(volume / "checkpoints", At("on_save_checkpoint", 2, terminate), **arguments))
    kept = volume / "checkpoints" / "epoch=0-step=2.ckpt"
    saved = kept.read_bytes()
    # The resumed training's first accumulation, before its first step.
    trainer = make(volume / "checkpoints", At("on_train_batch_end", 2, terminate, after=1), **arguments)
    stop(trainer)
    assert kept.read_bytes() == saved
    assert announced(agent) == [(2, JUST_IN_TIME), (3, JUST_IN_TIME)]


def test_started_in_a_pod_that_ends_it_leaves_before_the_first_step(agent: AgentServer, volume: Path) -> None:
    agent.terminating = True
    steps: list[int] = []
    stop(make(volume / "checkpoints", At("on_train_batch_end", 1, lambda: steps.append(1))))
    assert steps == []
    assert announced(agent) == []


def test_a_second_notice_in_the_just_in_time_save_changes_nothing(agent: AgentServer, volume: Path) -> None:
    stop(make(volume / "checkpoints", At("on_train_batch_end", 3, terminate), At("on_save_checkpoint", 3, terminate)))
    assert announced(agent) == [(3, JUST_IN_TIME)]


def test_stopped_twice_in_one_validation_it_still_runs_all_of_it(
    agent: AgentServer, volume: Path, undisturbed: Callable[..., Model]
) -> None:
    output = volume / "checkpoints"
    computed = []
    for batch in (1, 0, 2):
        stopped = stop(make(output, At("on_validation_batch_end", 5, terminate, after=batch)), plateau=True)
        computed += stopped.computed
        # Of our own there is one.
        assert len(list(output.glob("keepstep-*"))) == 1
    assert announced(agent)[1:] == [(5, JUST_IN_TIME)] * 3
    assert computed + fit(make(output), plateau=True).computed == undisturbed().computed


def test_the_program_may_say_where_to_begin(agent: AgentServer, volume: Path) -> None:
    output = volume / "checkpoints"
    stop(make(output, At("on_train_batch_end", 7, terminate)))
    assert steps(fit(make(output, max_steps=6), ckpt_path=output / "epoch=0-step=4.ckpt")) == [5, 6]


def test_the_last_checkpoint_is_the_newer_of_the_programs_and_what_was_saved_just_in_time(
    agent: AgentServer, volume: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"

    def go_on(*callbacks: Any) -> Any:
        trainer = make(elsewhere, *callbacks)
        trainer.checkpoint_callback.save_last = True
        return trainer

    assert steps(stop(go_on(At("on_train_batch_end", 6, terminate)), ckpt_path="last")) == [1, 2, 3, 4, 5, 6]
    assert steps(stop(go_on(At("on_train_batch_end", 9, terminate)), ckpt_path="last")) == [7, 8, 9]
    for path in (volume / "checkpoints").glob("outside/**/elsewhere/keepstep-*"):
        path.unlink()
    # What the program saved on a disk of its own after step 8.
    assert steps(fit(go_on(), ckpt_path="last"))[0] == 9


def test_what_was_saved_just_in_time_is_the_last_checkpoint_where_the_program_has_none(
    agent: AgentServer, volume: Path
) -> None:
    stop(make(volume / "checkpoints", At("on_train_batch_end", 3, terminate)), ckpt_path="last")
    assert steps(fit(make(volume / "checkpoints"), ckpt_path="last"))[0] == 4


def test_a_finished_training_is_not_trained_further(agent: AgentServer, volume: Path) -> None:
    finished = fit(make(volume / "checkpoints", max_steps=8))
    again = fit(make(volume / "checkpoints", max_steps=8))
    assert not steps(again)
    assert weights(again) == weights(finished)


def test_a_write_in_the_background_is_announced_when_it_is_done(agent: AgentServer, volume: Path) -> None:
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    output = volume / "checkpoints"
    stop(make(output, At("on_train_batch_end", 7, terminate), plugins=[AsyncCheckpointIO()]))
    assert announced(agent) == [(4, PERIODIC), (7, JUST_IN_TIME)]
    assert steps(fit(make(output, max_steps=8))) == [8]
