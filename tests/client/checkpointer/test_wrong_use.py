"""A program that uses a Checkpointer in a way that makes no sense is told so."""

import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.client.checkpointer.saved_steps import Make, save, visible

from keepstep import UsageError


@pytest.mark.parametrize(("step", "kind"), [(-1, None), (1, "finale")])
def test_arguments_that_make_no_sense_are_refused_before_anything_is_written(
    make: Make, directory: Path, step: int, kind: str | None
) -> None:
    checkpointer = make()
    with pytest.raises(UsageError), checkpointer.save(step, kind):
        pass
    assert visible(directory) == []


def test_a_rank_above_0_without_a_process_group_is_told_what_to_do(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="rank 1 would save alone") as raised:
        make().resume()
    assert "rank0_only=True" in raised.value.hint


def test_one_process_may_save_for_all(make: Make, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    save(make(rank0_only=True), 1)
    assert visible(directory) == ["checkpoint-1"]


def test_keeping_no_checkpoint_is_refused(make: Make) -> None:
    with pytest.raises(UsageError):
        make(keep_local=0)


@pytest.mark.parametrize("use", [lambda save: save / "state.pt", os.fspath], ids=["joined", "as a path"])
def test_a_save_that_is_used_without_with_is_refused(make: Make, directory: Path, use: Callable[..., object]) -> None:
    with pytest.raises(UsageError) as raised:
        use(make().save(1))
    assert "with checkpointer.save(1)" in raised.value.hint
    assert visible(directory) == []


def test_a_save_that_is_never_entered_is_said(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    make().save(3)
    gc.collect()
    assert [record.getMessage() for record in caplog.records if "`with`" in record.getMessage()] != []


def test_a_checkpoint_that_nobody_read_is_said_when_an_earlier_step_is_saved(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    save(make(), 100)
    fresh = make()
    save(fresh, 1)
    save(fresh, 2)
    assert [record.args for record in caplog.records if "nothing has read it" in record.msg] == [(100, 1)]


@pytest.mark.parametrize("resumes", [True, False])
def test_who_resumes_or_is_past_what_is_here_hears_nothing(
    make: Make, caplog: pytest.LogCaptureFixture, resumes: bool
) -> None:
    save(make(), 100)
    fresh = make()
    if resumes:
        fresh.resume()
    save(fresh, 1 if resumes else 101)
    assert "nothing has read it" not in caplog.text


def test_an_interval_that_makes_no_sense_is_refused_at_the_first_step(make: Make) -> None:
    with pytest.raises(UsageError):
        make().should_save(1, every="soon")
