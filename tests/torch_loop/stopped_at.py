"""Runs an example's own file; one rank gets SIGTERM at its first backward pass behind an optimizer step.

torchrun … tests/torch_loop/stopped_at.py <step> <rank> examples/x.py <its arguments>
"""

import os
import runpy
import signal
import sys
import threading
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from keepstep.gate import Action, RanksGate
from keepstep.gate.gates import Decision


def main() -> None:
    step, rank, program = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    steps_left = [step]
    backward, decide = torch.Tensor.backward, RanksGate._decide
    decided = threading.Event()

    def decide_and_tell(gate: RanksGate, number: int) -> Decision:
        decision = decide(gate, number)
        if decision.action is Action.SAVE_AND_EXIT:
            decided.set()
        return decision

    def stepped(*_: object) -> None:
        steps_left[0] -= 1

    def backward_and_stop(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> None:
        backward(tensor, *arguments, **keywords)
        if steps_left[0] == 0 and os.environ["RANK"] == rank:
            steps_left[0] -= 1
            os.kill(os.getpid(), signal.SIGTERM)
            # A step is a few milliseconds here; real ones leave the gate's threads the time they need.
            assert decided.wait(300)

    register_optimizer_step_post_hook(stepped)
    torch.Tensor.backward = backward_and_stop  # type: ignore[assignment]
    RanksGate._decide = decide_and_tell  # type: ignore[assignment,method-assign]
    sys.argv = sys.argv[3:]
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
