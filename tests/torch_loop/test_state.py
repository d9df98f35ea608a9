"""The state of one process's training: what is taken over from a checkpoint, and that nothing is missing."""

from pathlib import Path

import pytest
import torch
from tests.torch_loop.small import EPOCH, Small, make_loader, resumed

from keepstep import UsageError, random_generators
from keepstep.torch_loop import TrainingState
from keepstep.torch_loop.state import _seed_anew

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

KINDS = ("plain", "plain-random", "stateful", "stateful-random")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_resumed_in_the_midst_of_an_epoch_it_ends_bit_identical(kind: str, workers: int, tmp_path: Path) -> None:
    def loader() -> object:
        return make_loader(kind, workers=workers, augments=workers == 0)

    whole = Small(loader())
    # Into the second epoch, and out of it after the cut.
    whole.train(2 * EPOCH + 5)
    cut = Small(loader())
    before = list(cut.train(EPOCH + 5))
    cut.state.save(tmp_path)
    rest = resumed(tmp_path, loader())
    assert before + rest.train(2 * EPOCH + 5) == whole.losses
    assert rest.everything() == whole.everything()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut_at", [EPOCH, EPOCH - 1, 1])
def test_where_in_an_epoch_it_was_cut_makes_no_difference(kind: str, cut_at: int, tmp_path: Path) -> None:
    whole = Small(make_loader(kind, workers=0, augments=True))
    whole.train(EPOCH + 3)
    cut = Small(make_loader(kind, workers=0, augments=True))
    before = list(cut.train(cut_at))
    cut.state.save(tmp_path)
    rest = resumed(tmp_path, make_loader(kind, workers=0, augments=True))
    assert before + rest.train(EPOCH + 3) == whole.losses
    assert rest.everything() == whole.everything()


def test_a_plain_loaders_workers_draw_the_same_again(tmp_path: Path) -> None:
    def loader() -> object:
        return make_loader("plain-random", workers=2, augments=True)

    whole = Small(loader())
    whole.train(EPOCH + 6)
    cut = Small(loader())
    before = list(cut.train(EPOCH + 2))
    cut.state.save(tmp_path)
    assert before + resumed(tmp_path, loader()).train(EPOCH + 6) == whole.losses


@pytest.mark.parametrize("kind", ["plain", "stateful"])
def test_saved_between_two_steps_that_accumulate_gradients_it_ends_bit_identical(kind: str, tmp_path: Path) -> None:
    whole = Small(make_loader(kind, workers=0, augments=True), accumulate=3)
    whole.train(7)
    cut = Small(make_loader(kind, workers=0, augments=True), accumulate=3)
    before = list(cut.train(5))
    cut.state.save(tmp_path)
    rest = resumed(tmp_path, make_loader(kind, workers=0, augments=True), accumulate=3)
    assert before + rest.train(7) == whole.losses
    assert rest.everything() == whole.everything()


def test_resumed_twice_it_ends_bit_identical(tmp_path: Path) -> None:
    whole = Small(make_loader("stateful", workers=0, augments=True))
    whole.train(9)
    first = Small(make_loader("stateful", workers=0, augments=True))
    losses = list(first.train(3))
    first.state.save(tmp_path / "3")
    second = resumed(tmp_path / "3", make_loader("stateful", workers=0, augments=True))
    losses += second.train(6)
    second.state.save(tmp_path / "6")
    third = resumed(tmp_path / "6", make_loader("stateful", workers=0, augments=True))
    assert losses + third.train(9) == whole.losses


def test_the_epochs_that_are_left_are_trained_and_no_more(tmp_path: Path) -> None:
    first = Small(make_loader("stateful", workers=0, augments=False))
    first.train(EPOCH + 3)
    first.state.save(tmp_path)
    second = resumed(tmp_path, make_loader("stateful", workers=0, augments=False))
    assert len(list(second.state.batches(epochs=3))) == 2 * EPOCH - 3
    assert second.state.epoch == 3
    assert list(second.state.batches(epochs=3)) == []


def test_the_sampler_learns_its_epoch_also_when_resumed(tmp_path: Path) -> None:
    def distributed() -> object:
        data = make_loader("plain", workers=0, augments=False).dataset
        sampler = torch.utils.data.DistributedSampler[torch.Tensor](data, num_replicas=1, rank=0)
        return torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler)

    whole = Small(distributed())
    whole.train(EPOCH + 5)
    cut = Small(distributed())
    before = list(cut.train(EPOCH + 2))
    cut.state.save(tmp_path)
    assert before + resumed(tmp_path, distributed()).train(EPOCH + 5) == whole.losses
    assert len(set(whole.losses)) == EPOCH + 5


def test_without_a_loader_the_generators_go_on_at_once(tmp_path: Path) -> None:
    small = Small()
    small.state.save(tmp_path)
    expected = torch.rand(3)
    resumed(tmp_path)
    assert torch.equal(torch.rand(3), expected)


def test_without_a_loader_there_are_no_batches() -> None:
    with pytest.raises(UsageError, match="no batches"):
        next(Small().state.batches())


def test_a_save_before_the_first_step_leaves_the_training_as_it_is(tmp_path: Path) -> None:
    whole = Small(make_loader("plain", workers=0, augments=True))
    whole.train(4)
    other = Small(make_loader("plain", workers=0, augments=True))
    other.state.save(tmp_path)
    assert other.train(4) == whole.losses
    assert other.everything() == whole.everything()
    again = resumed(tmp_path, make_loader("plain", workers=0, augments=True))
    assert again.train(4) == whole.losses
    assert again.everything() == whole.everything()


@pytest.mark.parametrize("steps", [0, 3])
def test_an_optimizer_without_a_state_costs_a_save_nothing(
    steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stateless() -> tuple[torch.nn.Linear, torch.optim.SGD]:
        model = torch.nn.Linear(4, 4)
        return model, torch.optim.SGD(model.parameters(), lr=0.5)

    model, optimizer = stateless()
    for _ in range(steps):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with monkeypatch.context() as watched:
        watched.setattr(optimizer, "step", lambda **_: pytest.fail("a save took a step"))
        TrainingState(model, optimizer).save(tmp_path)
    assert all(parameter.grad is None for parameter in model.parameters())
    other, other_optimizer = stateless()
    TrainingState(other, other_optimizer).restore(tmp_path)
    assert torch.equal(other.weight, model.weight)
    assert all(parameter.grad is None for parameter in other.parameters())


def test_what_changes_after_it_was_captured_is_not_in_the_ranks_own_part(tmp_path: Path) -> None:
    small = Small(make_loader("stateful", workers=0, augments=True))
    small.train(3)
    captured = small.state.capture()
    own = captured["ranks"]["0"]
    small.train(6)
    assert captured["ranks"]["0"] == own
    assert small.state.capture()["ranks"]["0"] != own


@pytest.mark.parametrize("damage", ["empty", "another model"])
def test_what_is_not_the_state_of_this_training_is_refused_in_a_sentence(damage: str, tmp_path: Path) -> None:
    if damage == "another model":
        model = torch.nn.Linear(3, 3)
        TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1)).save(tmp_path)
    with pytest.raises(UsageError, match="does not hold the state of this training"):
        Small().state.restore(tmp_path)


def test_numpy_that_was_not_imported_then_keeps_its_own_seed() -> None:
    states = random_generators.capture()
    del states["numpy"]
    random_generators.restore(states)
    assert set(random_generators.capture()) >= {"python", "torch", "numpy"}


def test_generators_seeded_anew_depend_on_the_numbers_alone() -> None:
    drawn = []
    for parts in ((5, 1), (5, 1), (5, 2)):
        _seed_anew(*parts)
        drawn.append(torch.rand(4))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
