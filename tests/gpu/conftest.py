"""The GPU lane: on which device it runs.

`make test-gpu`; with GPU_LANE_DEVICE=cpu what a CPU can show of it.
"""

import os

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> str:
    name = os.environ.get("GPU_LANE_DEVICE", "cuda")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch finds no GPU here")
    return name


@pytest.fixture(scope="session")
def gpu(device: str) -> str:
    """The device, for what a CPU cannot show."""
    if device == "cpu":
        pytest.skip("a CPU cannot show this")
    return device
