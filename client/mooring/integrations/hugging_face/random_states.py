"""The random generators as they were before an evaluation.

`mooring.torch_loop` has the like for checkpoints, and imports much more.
"""

import random
import sys
from typing import Any

import torch


class RandomStates:
    """Of Python, NumPy if it is used, PyTorch and this rank's GPU."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._torch = torch.get_rng_state()
        numpy = sys.modules.get("numpy")
        self._numpy: Any = None if numpy is None else numpy.random.get_state()
        on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._gpu = torch.cuda.get_rng_state() if on_gpu else None

    def restore(self) -> None:
        random.setstate(self._python)
        torch.set_rng_state(self._torch)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        if self._gpu is not None:
            torch.cuda.set_rng_state(self._gpu)
