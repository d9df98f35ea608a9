"""The lives of one program under `keepstep run`: it is killed at a chosen moment, loses its disk, and starts again.

Reads what the program prints, and what the destination holds after each snapshot. Every wait has a bound.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from tests.harness.agent_process import wait_until
from tests.harness.bucket_view import step_of
from tests.harness.run_process import JUST_IN_TIME, NOT_DURABLE, RunProcess

PACE: Final = {"STEP_SECONDS": "0.03", "WRITE_SECONDS": "0.03", "EVALUATION_SECONDS": "9"}
"""An evaluation is twice as long as the quiet that a snapshot waits for, with the pauses between the looks: on a busy
machine the agent looks late."""
RESTLESS_PACE: Final = {"STEP_SECONDS": "0.3", "WRITE_SECONDS": "0.03"}
"""Without a rest as long as the one after which a program counts as quiet."""
SLOW_PACE: Final = {**PACE, "WRITE_SECONDS": "0.2"}
VERY_SLOW_WRITES: Final = {"WRITE_SECONDS": "2"}
# They bound a hang and judge no speed.
_WAIT_SECONDS: Final = 400.0
_LATE_SECONDS: Final = 4.0
_RANDOM_SECONDS: Final = 2.5
_MOST_CHANGES: Final = 6


class Moment(StrEnum):
    """When a program is killed. All but the first three are after a snapshot of this life."""

    BEGUN_WRITE = "when it has begun to write one of the first checkpoints"
    EARLY_WRITE = "while it writes one of the first checkpoints"
    JUST_SAVED = "when one of the first saves is complete"
    WRITE = "while it writes a checkpoint"
    ANY = "at any moment"


class Ending(StrEnum):
    """How a life ends."""

    PROGRAM = "the program is killed"
    EVERYTHING = "the program, its runner and its agent are killed"
    TOLD = "the run gets a SIGTERM, for which the program has no handler"


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A stored snapshot: its `files` by path, as its manifest has them, and the keys of its own `objects`."""

    number: int
    save: str
    files: Mapping[str, Mapping[str, Any]]
    objects: frozenset[str]


@dataclass(slots=True, kw_only=True)
class Lives:
    """All lives of one program.

    `pace`: how long its work takes in the lives that are killed. `held_seconds`: a snapshot holds everything that was
    complete so long before.

    `saved` are the steps that it may have complete, and `stored` is the one that it must not fall behind. `torn` counts
    the saves that a kill cut short. `log` is what the last whole life printed, with its agent.
    """

    program: str
    folder: Path
    seed: int
    command: tuple[str, ...] = (sys.executable,)
    pace: Mapping[str, str] = field(default_factory=lambda: PACE)
    held_seconds: float = 2.0
    saved: set[int] = field(default_factory=lambda: {0})
    stored: int = 0
    resumed: list[int] = field(default_factory=list)
    history: list[str] = field(default_factory=list)
    torn: int = 0
    log: str = ""

    @property
    def output(self) -> Path:
        return self.folder / "out"

    @property
    def store(self) -> Path:
        return self.folder / "store"

    def killed(self, steps: int, moment: Moment, ending: Ending = Ending.PROGRAM) -> None:
        """Start it, end it at that moment, and lose its disk."""
        with self._life(steps, self.pace) as run:
            self._wait_begun(run)
            if moment in (Moment.WRITE, Moment.ANY):
                self._wait_snapshot(run)
            _MOMENTS[moment](run, self.output, random.Random(f"{self.program} {self.seed} {len(self.resumed)}"))
            said = [int(line[1]) for line in _said(run, "saved")]
            started = _forked(run.process.pid)
            match ending:
                case Ending.PROGRAM:
                    _kill(run, launched=len(self.command) > 1)
                case Ending.EVERYTHING:
                    _kill_everything(run)
                case Ending.TOLD:
                    run.signal(signal.SIGTERM)
            self._note_end(run, f"{moment}, {ending}", ending)
            # Ranks may outlive whom the signal was for, and its grace period.
            for pid in started:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if ending is Ending.TOLD and run.process.returncode == JUST_IN_TIME:
                # All that was whole is stored.
                self.stored = max([self.stored, *said])

    def killed_when(
        self, steps: int, holds: Callable[[Path], bool], *, snapshot_first: bool = False, late_agent: bool = False
    ) -> None:
        """Start it, on a very slow disk, and kill it when something holds for its output directory.

        `late_agent`: the agent learns of it seconds later.
        """
        with self._life(steps, SLOW_PACE) as run:
            self._wait_begun(run)
            if snapshot_first:
                self._wait_snapshot(run)
            _wait(run, lambda: holds(self.output), "the moment to kill it")
            with _stopped(run.agent_pid() if late_agent else None):
                _kill(run, launched=len(self.command) > 1)
            self._note_end(run, "at a chosen moment")

    def whole(self, steps: int) -> str:
        """Let it come to its end, and lose its disk; return the digest of its final state."""
        with self._life(steps, {}) as run:
            code = run.wait(_WAIT_SECONDS)
            assert code == 0
            self._check_resumed(run)
            self._note_saved(run)
            (digest,) = (line[1] for line in _said(run, "done"))
            self.log = run.output()
        self.stored = steps
        return digest

    def snapshots(self) -> list[Snapshot]:
        """All that are stored, in order."""
        return [self._snapshot(marker) for marker in sorted(self._markers(), reverse=True)]

    @contextmanager
    def _life(self, steps: int, pace: Mapping[str, str]) -> Iterator[RunProcess]:
        """One start; its disk is lost at the end. An error tells all that was before."""
        run = RunProcess(
            self.folder / f"volume-{len(self.resumed)}",
            f"file://{self.store}",
            # Its defaults would win over the environment.
            trainer=pace,
            command=(*self.command, "-m", f"tests.programs.{self.program}", str(self.output), str(steps)),
            watch=self.output,
            # Nobody has given back what those held that were killed.
            take_over=True,
        )
        try:
            with run:
                yield run
        except AssertionError as error:
            stored = [
                f"snapshot {one.number}: {sorted(one.files)}; sent {sorted(one.objects)}" for one in self.snapshots()
            ]
            error.add_note(
                "\n".join([self.program, *self.history, *stored, f"here: {_names(self.output)}", run.output()])
            )
            raise
        self._lose_disk()

    def _wait_begun(self, run: RunProcess) -> None:
        _wait(run, lambda: bool(_said(run, "resumed")), "it begins")
        self._check_resumed(run)

    def _wait_snapshot(self, run: RunProcess) -> None:
        """Wait until another one is stored, and note what it must hold."""
        before = self._markers()
        _wait(run, lambda: self._markers() > before, "a snapshot is stored")
        number = max(step_of(marker) for marker in self._markers())
        lines = [line for line in _said(run, "saved") if float(line[2]) <= number - self.held_seconds]
        self.stored = max([self.stored, *(int(line[1]) for line in lines)])

    def _note_end(self, run: RunProcess, moment: str, ending: Ending = Ending.PROGRAM) -> None:
        code = run.wait(_WAIT_SECONDS)
        self._note_saved(run)
        self.history.append(f"ended {moment}: {code}; it said {_last(run)}; it had {_names(self.output)}")
        match ending:
            case Ending.PROGRAM:
                assert code == 128 + signal.SIGKILL
            case Ending.EVERYTHING:
                assert code == -signal.SIGKILL
            case Ending.TOLD:
                named = [line for line in run.output().splitlines() if line.startswith("keepstep: not durable: ")]
                assert code == (NOT_DURABLE if named else JUST_IN_TIME)

    def _check_resumed(self, run: RunProcess) -> None:
        ((_, resumed),) = _said(run, "resumed")
        assert int(resumed) in self.saved, f"resumed {resumed}, which it never saved"
        assert int(resumed) >= self.stored, f"resumed {resumed}, but {self.stored} was stored"
        self.resumed.append(int(resumed))
        self.history.append(f"resumed {resumed}")

    def _note_saved(self, run: RunProcess) -> None:
        saving = [int(line[1]) for line in _said(run, "saving")]
        saved = [int(line[1]) for line in _said(run, "saved")]
        self.torn += saving[len(saved) :] != []
        # It may be complete before the program says so.
        self.saved.update(saving)

    def _lose_disk(self) -> None:
        shutil.rmtree(self.output)
        for volume in self.folder.glob("volume-*/"):
            shutil.rmtree(volume)

    def _markers(self) -> frozenset[str]:
        return frozenset(_names(self.store / ".keepstep" / "snapshots" / "node-0"))

    def _snapshot(self, marker: str) -> Snapshot:
        _, save, _ = marker.split(".")
        below = self.store / "node-0" / save
        manifest = json.loads((below / ".keepstep" / "manifest-00000-00001.json").read_bytes())
        objects = frozenset(_names(below)) - {".keepstep/manifest-00000-00001.json", ".keepstep/base.json"}
        files = {file["path"]: file for file in manifest["ranks"][0]["files"]}
        return Snapshot(number=step_of(marker), save=save, files=files, objects=objects)


def _while_writing(run: RunProcess, output: Path, chance: random.Random) -> None:
    """Wait until it begins a save, and its files have then changed some times, or not at all."""
    saving, changes = len(_said(run, "saving")), chance.randrange(_MOST_CHANGES)
    _wait(run, lambda: len(_said(run, "saving")) > saving, "it saves")
    seen = _look(output)

    def changed() -> bool:
        nonlocal seen, changes
        now = _look(output)
        changes -= now != seen
        seen = now
        return changes <= 0 or len(_said(run, "saved")) > saving

    _wait(run, changed, "its files change")


def _begun_write(run: RunProcess, _: Path, __: random.Random) -> None:
    _wait(run, lambda: len(_said(run, "saving")) > len(_said(run, "saved")), "it saves")


def _early_write(run: RunProcess, output: Path, chance: random.Random) -> None:
    saves = len(_said(run, "saved")) + chance.randrange(2)
    _wait(run, lambda: len(_said(run, "saved")) >= saves, "it saves")
    _while_writing(run, output, chance)


def _just_saved(run: RunProcess, output: Path, chance: random.Random) -> None:
    saves = len(_said(run, "saved")) + chance.randrange(1, 3)
    _wait(run, lambda: len(_said(run, "saved")) >= saves, "it has saved")


def _any_moment(run: RunProcess, output: Path, chance: random.Random) -> None:
    moment = time.monotonic() + chance.uniform(0, _RANDOM_SECONDS)
    _wait(run, lambda: time.monotonic() >= moment, "the moment")


_MOMENTS: Final = {
    Moment.BEGUN_WRITE: _begun_write,
    Moment.EARLY_WRITE: _early_write,
    Moment.JUST_SAVED: _just_saved,
    Moment.WRITE: _while_writing,
    Moment.ANY: _any_moment,
}


def _wait(run: RunProcess, holds: Callable[[], bool], what: str) -> None:
    def holds_and_it_lives() -> bool:
        assert run.process.poll() is None, f"it ended with {run.process.returncode} before {what}"
        return holds()

    wait_until(holds_and_it_lives, _WAIT_SECONDS, what)


@contextmanager
def _stopped(pid: int | None) -> Iterator[None]:
    """Stop a process for a while after what happens meanwhile, as on a machine that is very busy."""
    if pid is not None:
        os.kill(pid, signal.SIGSTOP)
    yield
    if pid is not None:
        moment = time.monotonic() + _LATE_SECONDS
        wait_until(lambda: time.monotonic() >= moment, 2 * _LATE_SECONDS, "it is late")
        os.kill(pid, signal.SIGCONT)


def _kill(run: RunProcess, *, launched: bool) -> None:
    """SIGKILL the program and the processes that it has forked, but not what has launched it."""
    for pid, line in run.children().items():
        if " tests.programs." in line:
            for one in (pid, *_forked(pid)) if not launched else _forked(pid):
                # A rank may have ended because another one has.
                with suppress(ProcessLookupError):
                    os.kill(one, signal.SIGKILL)


def _kill_everything(run: RunProcess) -> None:
    """SIGKILL the runner and all that it has started, at once."""
    started = [run.process.pid, *_forked(run.process.pid)]
    for pid in started:
        os.kill(pid, signal.SIGSTOP)
    for pid in started:
        os.kill(pid, signal.SIGKILL)


def _forked(pid: int) -> list[int]:
    with suppress(FileNotFoundError, ProcessLookupError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [one for child in map(int, children) for one in (child, *_forked(child))]
    return []


def _said(run: RunProcess, word: str) -> list[list[str]]:
    """The words of each line of the program that begins with this one."""
    lines = run.output().splitlines(keepends=True)
    return [line.split() for line in lines if line.startswith(f"{word} ") and line.endswith("\n")]


def _last(run: RunProcess) -> str:
    lines = [line for line in run.output().splitlines() if line.startswith(("resumed ", "saving ", "saved ", "done "))]
    return lines[-1] if lines else "nothing"


def _names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in _files(folder))


def _look(folder: Path) -> dict[str, tuple[int, int]]:
    found = {}
    for path in _files(folder):
        with suppress(FileNotFoundError):
            status = path.lstat()
            found[str(path)] = status.st_size, status.st_mtime_ns
    return found


def _files(folder: Path) -> Iterator[Path]:
    # Unlike rglob, it does not mind what is deleted meanwhile.
    for above, _, names in os.walk(folder):
        yield from (Path(above, name) for name in names)
