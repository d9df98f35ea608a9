"""Runs a trainer's own file as __main__, at the pace a test dictates, and tells the test how far each rank is.

    torchrun … tests/trainers/paced.py examples/x.py <its arguments>

The test writes `orders.json` into PACE_DIRECTORY (see `tests.trainers.job.Job.order`); each rank answers with
`rank-<rank>.<restart>.log`, its pid, then a line `<step> <monotonic seconds>` per optimizer step, and
with `held-<rank>` while it is held. Where a rank can be held:

    backward    after the first backward pass behind `step`: in the midst of an accumulation, or in the warm-up
    step        when the optimizer's step is done, before the framework or the loop hears of it
    evaluation  when the model is told to evaluate
    save        when the first folder or file of a checkpoint is being made, by whatever thread

The file `heard` says that the ranks have agreed on what follows from a notice, or that the one that saves for all has
had it; a slow step is over with that.

Everything is hooked from outside: neither the program nor its framework knows. PACE_WITHOUT_KEEPSTEP removes the lines
with the word keepstep from the program first: that is how it trains with zero code.
"""

import faulthandler
import gc
import json
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from keepstep.gate import Action, RanksGate, SingleProcessGate
from keepstep.gate.gates import Decision

_HOLD_SECONDS = 1800.0  # a test that died holds nobody for ever
_POLL_SECONDS = 0.005
_ANSWER_SECONDS = 300.0


class Pace:
    """One rank's. Steps are counted from PACE_BEGIN, where the program resumes."""

    def __init__(self, folder: Path) -> None:
        rank, restart = os.environ.get("RANK", "0"), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._orders_path = folder / "orders.json"
        self._held_path = folder / f"held-{rank}"
        self._heard_path = folder / "heard"
        self._checkpoints = os.environ["KEEPSTEP_CHECKPOINT_DIRECTORY"] + os.sep
        self._progress = (folder / f"rank-{rank}.{restart}.log").open("w", buffering=1)
        self._progress.write(f"pid {os.getpid()}\n")
        self._pid = os.getpid()
        self._step = int(os.environ.get("PACE_BEGIN", "0"))
        self._busy = threading.local()
        self.lone_gate: SingleProcessGate | None = None

    def stepped(self) -> None:
        self._step += 1
        self._progress.write(f"{self._step} {time.monotonic()}\n")
        ends_at = time.monotonic() + self._orders()["step_seconds"]
        while time.monotonic() < ends_at and not self._is_heard():
            time.sleep(_POLL_SECONDS)
        self.at("step")

    def heard(self) -> None:
        self._heard_path.touch()

    def _is_heard(self) -> bool:
        if self.lone_gate is not None and self.lone_gate.noticed:
            self.heard()
        return self._heard_path.exists()

    def audited(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Python tells of every file that is about to be made."""
        path = None
        if event == "os.mkdir" or (event == "open" and set(arguments[1] or "") & set("wax+")):
            path = arguments[0]
        elif event == "os.rename":
            path = arguments[1]
        if isinstance(path, str | Path) and str(path).startswith(self._checkpoints):
            self.at("save")

    def at(self, place: str) -> None:
        """Stay here for as long as the orders say so."""
        if getattr(self._busy, "here", False) or os.getpid() != self._pid:
            return
        self._busy.here = True
        try:
            give_up_at = time.monotonic() + _HOLD_SECONDS
            while self._is_held(place) and time.monotonic() < give_up_at:
                self._held_path.write_text(f"{place} {self._step}")
                time.sleep(_POLL_SECONDS)
            self._held_path.unlink(missing_ok=True)
        finally:
            self._busy.here = False

    def _is_held(self, place: str) -> bool:
        orders = self._orders()
        return bool(orders["hold"] == place and self._step >= orders["at_step"])

    def _orders(self) -> dict[str, Any]:
        orders: dict[str, Any] = json.loads(self._orders_path.read_text())
        return orders


def _install(pace: Pace) -> None:
    def stepped(optimizer: object, arguments: object, keywords: object) -> None:
        # torch makes the state of a fresh optimizer by a step that is none, before it loads one.
        if "_init_optim_state" not in _callers():
            pace.stepped()

    register_optimizer_step_post_hook(stepped)
    backward, train = torch.Tensor.backward, torch.nn.Module.train

    def backward_and_tell(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> None:
        backward(tensor, *arguments, **keywords)
        pace.at("backward")

    # Not `eval`, which some models override; all come by here.
    def train_and_tell(module: torch.nn.Module, mode: bool = True) -> torch.nn.Module:
        if not mode:
            pace.at("evaluation")
        return train(module, mode)

    decide = RanksGate._decide

    def decide_and_tell(gate: RanksGate, number: int) -> Decision:
        decision = decide(gate, number)
        if decision.action is Action.SAVE_AND_EXIT:
            pace.heard()
        return decision

    make_lone = SingleProcessGate.__init__

    def make_and_keep(gate: SingleProcessGate, *arguments: Any) -> None:
        make_lone(gate, *arguments)
        pace.lone_gate = gate

    RanksGate._decide = decide_and_tell  # type: ignore[assignment,method-assign]
    SingleProcessGate.__init__ = make_and_keep  # type: ignore[assignment,method-assign]
    torch.Tensor.backward = backward_and_tell  # type: ignore[assignment]
    torch.nn.Module.train = train_and_tell  # type: ignore[assignment,method-assign]
    sys.addaudithook(pace.audited)


def _callers() -> Iterator[str]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_code.co_name
        frame = frame.f_back


def _be_patient() -> None:
    """On a slow machine an agent that answers is not away."""
    from keepstep.agent_client import channel

    channel.ANNOUNCE_SECONDS = _ANSWER_SECONDS  # type: ignore[misc]
    channel.Channel._call.__kwdefaults__["deadline_seconds"] = _ANSWER_SECONDS  # type: ignore[index]


def _without_keepstep(program: Path, folder: Path) -> Path:
    lines = program.read_text().splitlines(keepends=True)
    copy = folder / f"{program.stem}.{os.environ.get('RANK', '0')}.py"
    copy.write_text("".join(line for line in lines if "keepstep" not in line))
    return copy


def main() -> None:
    folder = Path(os.environ["PACE_DIRECTORY"])
    program = Path(sys.argv[1])
    # To import a framework makes a million objects and no garbage: to look for it costs a tenth of that.
    gc.set_threshold(100_000)
    # A rank that hangs says where, when the test asks.
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    _install(Pace(folder))
    if "PACE_PATIENT" in os.environ:
        _be_patient()
    if "PACE_WITHOUT_KEEPSTEP" in os.environ:
        program = _without_keepstep(program, folder)
    sys.argv = [str(program), *sys.argv[2:]]
    runpy.run_path(str(program), run_name="__main__")


if __name__ == "__main__":
    main()
