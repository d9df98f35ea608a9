"""torch.distributed.checkpoint by zero code: what of a loop's saves is announced, and what is left alone."""

import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch.distributed.checkpoint import FileSystemWriter

from keepstep.framework_run import FrameworkRun
from keepstep.integrations import dcp, ownership

ASIDE = Path("/volume/.keepstep/saving/1/checkpoint")


class Run:
    """What was announced, in place of a FrameworkRun."""

    def __init__(self) -> None:
        self.announced: list[tuple[Path, int]] = []
        self.places: list[Path] = []
        self.awaited: list[tuple[Any, Path, int]] = []

    def save(self, path: Path, step: int, write: Callable[[Path], object], *, elsewhere: bool, **options: bool) -> None:
        assert options == {"asynchronous": False, "program_folder": True}
        self.places.append(ASIDE if elsewhere else path)
        write(self.places[-1])
        self._saved = path, step

    def announce(self) -> None:
        self.announced.append(self._saved)

    def close(self) -> None:
        """At the end of pytest."""

    def announce_when(self, future: "Future[Any]", path: Path, step: int) -> None:
        self.awaited.append((future, path, step))


class Ranks(ModuleType):
    """torch.distributed, of which only a size is looked at."""

    def __init__(self, world_size: int) -> None:
        super().__init__("torch.distributed")
        self._world_size = world_size

    def is_initialized(self) -> bool:
        return True

    def get_world_size(self, group: int | None = None) -> int:
        return self._world_size if group is None else group


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    made = Run()
    monkeypatch.setattr(FrameworkRun, "current", lambda: made)
    monkeypatch.setattr(ownership, "_outermost", None)
    monkeypatch.setattr(dcp, "_state", dcp._State())
    monkeypatch.setitem(sys.modules, "torch.distributed", Ranks(2))
    return made


@pytest.fixture
def saver(run: Run) -> ModuleType:
    """The module as torch has it; what `save` and `async_save` return is in `saved` and `writing`."""
    module = ModuleType("torch.distributed.checkpoint.state_dict_saver")
    module.saved, module.writing = object(), Future()  # type: ignore[attr-defined]
    module.save = lambda *_, **__: module.saved  # type: ignore[attr-defined]
    module.async_save = lambda *_, **__: module.writing  # type: ignore[attr-defined]
    dcp.autoload(module)
    return module


def test_a_save_is_announced_with_the_last_number_of_its_name_as_the_step(saver: ModuleType, run: Run) -> None:
    assert saver.save({}, checkpoint_id="/volume/run-7/epoch-2-step-1200") is saver.saved
    saver.save({}, checkpoint_id=Path("/volume/run-7/1300"))
    assert run.announced == [(Path("/volume/run-7/epoch-2-step-1200"), 1200), (Path("/volume/run-7/1300"), 1300)]


def test_an_asynchronous_save_is_announced_when_it_is_written(saver: ModuleType, run: Run) -> None:
    assert saver.async_save({}, checkpoint_id="/volume/step-5") is saver.writing
    assert run.awaited == [(saver.writing, Path("/volume/step-5"), 5)]


def test_one_that_also_tells_when_it_is_staged_is_announced_when_it_is_written(saver: ModuleType, run: Run) -> None:
    written: Future[None] = Future()
    answer = SimpleNamespace(staging_completion=Future(), upload_completion=written)
    setattr(saver, "writing", answer)  # noqa: B010
    saver.async_save({}, checkpoint_id="/volume/step-5")
    assert [future for future, _, _ in run.awaited] == [written]


def test_the_path_of_a_storage_writer_is_taken_too(saver: ModuleType, run: Run) -> None:
    saver.save({}, storage_writer=SimpleNamespace(path=Path("/volume/step-5")))
    saver.save({}, SimpleNamespace(path="/volume/step-6"))
    assert [step for _, step in run.announced] == [5, 6]
    # What a writer of the program's own does with another path is not known.
    assert run.places == [Path("/volume/step-5"), Path("/volume/step-6")]


def test_a_save_is_written_elsewhere_and_the_programs_writer_keeps_its_path(tmp_path: Path, run: Run) -> None:
    module = ModuleType("saver")
    seen: list[Path] = []

    def save(state: object, writer: Any = None, *, checkpoint_id: Any = None) -> None:
        if checkpoint_id is not None and writer is not None:
            writer.reset(checkpoint_id)
        seen.append(Path(checkpoint_id if writer is None else writer.path))

    module.save = module.async_save = save  # type: ignore[attr-defined]
    dcp.autoload(module)
    module.save({}, checkpoint_id=tmp_path / "step-5")
    writer = FileSystemWriter(tmp_path / "step-6")
    module.save({}, writer)
    assert seen == [ASIDE, ASIDE]
    assert Path(writer.path) == tmp_path / "step-6"
    assert run.announced == [(tmp_path / "step-5", 5), (tmp_path / "step-6", 6)]


@pytest.mark.parametrize(
    "keywords",
    [
        {"checkpoint_id": "s3://bucket/step-5"},
        {"storage_writer": object()},
        {"checkpoint_id": "/volume/latest"},
        {"checkpoint_id": "/volume/.saving-checkpoint-5-abc"},
        {"checkpoint_id": "/volume/.saving-checkpoint-5-abc/shards-2"},
        {"checkpoint_id": "/volume/step-5", "no_dist": True},
        {"checkpoint_id": "/volume/step-5", "process_group": 1},
    ],
    ids=[
        "no path",
        "a writer without one",
        "no number",
        "a Checkpointer's",
        "within a Checkpointer's",
        "one rank alone",
        "not all ranks",
    ],
)
def test_what_is_not_for_it_to_announce_is_left_alone(saver: ModuleType, run: Run, keywords: dict[str, Any]) -> None:
    assert saver.save({}, **keywords) is saver.saved
    assert run.announced == []


def test_a_group_of_all_ranks_is_as_good_as_none(saver: ModuleType, run: Run) -> None:
    saver.save({}, checkpoint_id="/volume/step-5", process_group=2)
    assert [step for _, step in run.announced] == [5]


def test_under_a_framework_that_speaks_for_the_loop_it_stays_out(saver: ModuleType, run: Run) -> None:
    ownership.claim(ownership.Owner.ACCELERATE)
    saver.save({}, checkpoint_id="/volume/step-5")
    assert run.announced == []


def test_a_save_in_another_thread_is_left_alone_because_ranks_may_order_them_differently(
    saver: ModuleType, run: Run
) -> None:
    thread = threading.Thread(target=lambda: saver.save({}, checkpoint_id="/volume/step-5"))
    thread.start()
    thread.join()
    assert run.announced == []


def test_an_error_of_ours_costs_one_warning_and_no_save(
    saver: ModuleType, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(run, "save", fail)
    for step in (5, 10):
        assert saver.save({}, checkpoint_id=f"/volume/step-{step}") is saver.saved
    assert capsys.readouterr().err == (
        "keepstep: torch.distributed.checkpoint is not protected: RuntimeError: on purpose\n"
    )


def test_an_error_of_the_save_reaches_the_program_and_nothing_is_announced(run: Run) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    module = ModuleType("saver")
    module.save = module.async_save = fail  # type: ignore[attr-defined]
    dcp.autoload(module)
    with pytest.raises(OSError, match="disk full"):
        module.save({}, checkpoint_id="/volume/step-5")
    assert run.announced == []


def test_sigterm_stays_the_programs(saver: ModuleType, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> Run:
        signal.signal(signal.SIGTERM, lambda *_: None)
        return run

    monkeypatch.setattr(FrameworkRun, "current", made)
    before = signal.getsignal(signal.SIGTERM)
    saver.save({}, checkpoint_id="/volume/step-5")
    assert signal.getsignal(signal.SIGTERM) == before
