"""A small training with Hugging Face's real Trainer, stopped by a real SIGTERM, in this process."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version
from tests.client.agent_server import AgentServer
from tests.integrations.conftest import leaving

from keepstep import protect
from keepstep.framework_run import FrameworkRun
from keepstep_api.v1 import agent_pb2

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")
TrainerCallback: Any = transformers.TrainerCallback

RELEASE = Version(transformers.__version__).release
"""tests/compatibility runs this folder's tests with older ones."""
SINCE_5 = pytest.mark.skipif(RELEASE < (5,), reason="older releases train one step more when training had ended")
STEPS, EPOCH = 12, 8
PERIODIC, JUST_IN_TIME, FINAL = agent_pb2.KIND_PERIODIC, agent_pb2.KIND_JUST_IN_TIME, agent_pb2.KIND_FINAL


class Counting:
    """Sequences that count upwards."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = (index + torch.arange(8) * (index % 3 + 1)) % 32
        return {"input_ids": tokens, "labels": tokens}


class At(TrainerCallback):  # type: ignore[misc]
    """Does something once, at an event of a step; `after`: at that event's next but so many."""

    def __init__(self, event: str, step: int, what: Callable[[], object], *, after: int = 0) -> None:
        self._step = step
        self._left = after + 1
        self._what = what
        setattr(self, event, self._on_event)

    def _on_event(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step:
            self._left -= 1
            if self._left == 0:
                self._what()


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def make(output: Path, *callbacks: Any, **arguments: Any) -> Any:
    """A Trainer whose every step depends on the random generators."""
    # As in a process of its own.
    FrameworkRun._trained.clear()
    transformers.set_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        attention_dropout=0.2,
    )
    settings = {
        "output_dir": str(output),
        "use_cpu": True,
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "save_steps": 4,
        "report_to": "none",
        "disable_tqdm": True,
        **arguments,
    }
    return transformers.Trainer(
        model=transformers.LlamaForCausalLM(config),
        args=transformers.TrainingArguments(**settings),
        train_dataset=Counting(4 * EPOCH),
        eval_dataset={"even": Counting(24), "odd": Counting(16)},
        callbacks=list(callbacks),
    )


def train(trainer: Any, **arguments: Any) -> Any:
    """Protected; the Trainer."""
    protect(trainer).train(**arguments)
    return trainer


def stop(trainer: Any, *, code: int = 143) -> None:
    """Train until the notice that one of its callbacks sends."""
    with leaving(code):
        train(trainer)


def logged(trainer: Any, *keys: str) -> list[tuple[int, str, float]]:
    """What the Trainer's log holds of losses and evaluations, also of what it resumed from."""
    keys = keys or ("loss", "grad_norm", "eval_even_loss", "eval_odd_loss")
    return [(entry["step"], key, entry[key]) for entry in trainer.state.log_history for key in keys if key in entry]


def weights(trainer: Any) -> list[Any]:
    return [parameter.tolist() for parameter in trainer.model.parameters()]


def announced(agent: AgentServer) -> list[tuple[int, int]]:
    return [(request.step, request.kind) for request in agent.requests("AnnounceCheckpoint")]


BEST: dict[str, Any] = {"load_best_model_at_end": True, "metric_for_best_model": "even_loss"}
EVALUATING = {**BEST, "eval_strategy": "steps", "eval_steps": 4, "greater_is_better": True}
"""The best model is that of the first evaluation."""
