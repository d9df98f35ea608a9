"""Programs that look for their checkpoint themselves, under lazy restore: whose process group has it brought."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from keepstep.autoload.zero_code import TRAINERS
from keepstep.errors import ErrorKind, VolumeError
from keepstep.framework_run import FrameworkRun
from keepstep.integrations import process_group
from keepstep_api import names

NEWEST = Path("/volume/checkpoints/step-10")

MakeGroup = Callable[[], None]


class Run:
    """In place of a FrameworkRun: what was asked of all that were made."""

    asked: list[str]
    newest_or_error: "Path | SystemExit | None"

    def newest(self) -> Path | None:
        self.asked.append("newest")
        if isinstance(self.newest_or_error, SystemExit):
            raise self.newest_or_error
        return self.newest_or_error

    def close(self) -> None:
        self.asked.append("close")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(process_group, "FrameworkRun", Run)
    monkeypatch.setattr(process_group, "_brought", False)
    monkeypatch.setattr(Run, "asked", [], raising=False)
    monkeypatch.setattr(Run, "newest_or_error", NEWEST, raising=False)
    # Another test of this process may have imported them.
    for name in process_group._ASK_THEMSELVES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv(names.ENV_RESUME, "")
    monkeypatch.setenv("WORLD_SIZE", "2")
    return Run.asked


@pytest.fixture
def make_group(asked: list[str]) -> MakeGroup:
    """The program's call, in a group of two."""
    module = ModuleType("torch.distributed.distributed_c10d")
    module.init_process_group = lambda: asked.append("met")  # type: ignore[attr-defined]
    module.get_world_size = lambda: 2  # type: ignore[attr-defined]
    process_group.autoload(module)
    process_group.autoload(module)
    made: MakeGroup = module.init_process_group
    return made


def test_all_frameworks_that_autoload_hooks_are_known() -> None:
    assert {module for module, _ in TRAINERS} | {"keepstep.torch_loop"} == process_group._ASK_THEMSELVES


def test_the_newest_is_brought_once_the_ranks_have_met_and_named(make_group: MakeGroup, asked: list[str]) -> None:
    make_group()
    assert asked == ["met", "newest", "close"]
    assert os.environ[names.ENV_RESUME] == str(NEWEST)


def test_a_second_group_of_the_process_brings_nothing(make_group: MakeGroup, asked: list[str]) -> None:
    make_group()
    make_group()
    assert asked == ["met", "newest", "close", "met"]


def test_a_run_that_begins_names_nothing(
    make_group: MakeGroup, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Run, "newest_or_error", None)
    make_group()
    assert asked == ["met", "newest", "close"]
    assert not os.environ[names.ENV_RESUME]


@pytest.mark.parametrize("name", sorted(process_group._ASK_THEMSELVES))
def test_who_asks_for_himself_is_left_alone(
    make_group: MakeGroup, asked: list[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    make_group()
    assert asked == ["met"]


def test_a_group_that_is_not_that_of_the_launched_ranks_is_left_alone(
    make_group: MakeGroup, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    make_group()
    assert asked == ["met"]


def test_without_a_launcher_every_group_is_the_jobs(
    make_group: MakeGroup, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE")
    make_group()
    assert asked == ["met", "newest", "close"]


def test_ranks_that_cannot_choose_end_the_program(
    make_group: MakeGroup, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Run, "newest_or_error", SystemExit("keepstep: not restored"))
    with pytest.raises(SystemExit, match="not restored"):
        make_group()
    assert asked == ["met", "newest", "close"]


def test_a_volume_that_cannot_be_used_ends_the_program(
    make_group: MakeGroup, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unusable() -> FrameworkRun:
        raise VolumeError(ErrorKind.VOLUME_UNUSABLE, "the volume cannot be written", hint="give another one")

    monkeypatch.setattr(process_group, "FrameworkRun", unusable)
    with pytest.raises(SystemExit, match="cannot be written; give another one"):
        make_group()
