"""TRL's trainers are Trainers: each is stopped just in time and goes on where it was."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.integrations.conftest import leaving

from keepstep import protect
from keepstep.framework_run import FrameworkRun
from keepstep.integrations import ownership
from keepstep_api import names

transformers: Any = pytest.importorskip("transformers")
trl: Any = pytest.importorskip("trl")
datasets: Any = pytest.importorskip("datasets")
tokenizers: Any = pytest.importorskip("tokenizers")
TrainerCallback: Any = transformers.TrainerCallback

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs

STEPS, STOPPED = 6, 3
WORDS = ["<pad>", "<eos>", "<unk>", "zero", "one", "two", "three", "four", "five", "six", "seven"]


class TerminateAt(TrainerCallback):  # type: ignore[misc]
    """SIGTERM to this process at the end of a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step:
            os.kill(os.getpid(), signal.SIGTERM)


def tokenizer() -> Any:
    """A word is a token."""
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def model(kind: Any = None, **more: Any) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        attention_dropout=0.2,
        pad_token_id=0,
        eos_token_id=1,
        **more,
    )
    return (kind or transformers.LlamaForCausalLM)(config)


def rows(count: int = 24) -> list[tuple[str, str, str]]:
    """A beginning, and how it goes on rightly and wrongly."""
    return [(WORDS[3 + n % 8], WORDS[3 + (n + 1) % 8], WORDS[3 + (n + 3) % 8]) for n in range(count)]


def common(output: Path) -> dict[str, Any]:
    return {
        "output_dir": str(output),
        "use_cpu": True,
        "bf16": False,
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "save_steps": 100,
        "report_to": "none",
        "disable_tqdm": True,
    }


def sft(output: Path, callbacks: list[Any]) -> Any:
    data = datasets.Dataset.from_list([{"text": f"{one} {right} {wrong}"} for one, right, wrong in rows()])
    return trl.SFTTrainer(
        model=model(),
        args=trl.SFTConfig(**common(output)),
        train_dataset=data,
        processing_class=tokenizer(),
        callbacks=callbacks,
    )


def dpo(output: Path, callbacks: list[Any]) -> Any:
    data = datasets.Dataset.from_list(
        [{"prompt": f"{one} ", "chosen": right, "rejected": wrong} for one, right, wrong in rows()]
    )
    return trl.DPOTrainer(
        model=model(),
        ref_model=model(),
        args=trl.DPOConfig(**common(output)),
        train_dataset=data,
        processing_class=tokenizer(),
        callbacks=callbacks,
    )


def reward(output: Path, callbacks: list[Any]) -> Any:
    data = datasets.Dataset.from_list(
        [{"chosen": f"{one} {right}", "rejected": f"{one} {wrong}"} for one, right, wrong in rows()]
    )
    return trl.RewardTrainer(
        model=model(transformers.LlamaForSequenceClassification, num_labels=1),
        args=trl.RewardConfig(**common(output)),
        train_dataset=data,
        processing_class=tokenizer(),
        callbacks=callbacks,
    )


def grpo(output: Path, callbacks: list[Any]) -> Any:
    data = datasets.Dataset.from_list([{"prompt": one} for one, *_ in rows()])
    return trl.GRPOTrainer(
        model=model(),
        reward_funcs=lambda completions, **_: [float(len(set(one.split()))) for one in completions],
        args=trl.GRPOConfig(**common(output), num_generations=2, max_completion_length=4),
        train_dataset=data,
        processing_class=tokenizer(),
        callbacks=callbacks,
    )


def losses(trainer: Any) -> list[tuple[int, float]]:
    return [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]


SINCE_0_14 = pytest.mark.skipif(not hasattr(trl, "GRPOTrainer"), reason="trl has this trainer since 0.14")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("make", "identical"),
    [(sft, True), (dpo, True), (reward, True), pytest.param(grpo, False, marks=SINCE_0_14)],
)
def test_trained_by_any_of_them_nothing_is_lost(
    make: Callable[..., Any], identical: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(names.ENV_VOLUME, str(tmp_path / "v"))
    monkeypatch.setattr(ownership, "_outermost", None)
    monkeypatch.setattr(FrameworkRun, "_trained", set())
    output = tmp_path / "v" / "checkpoints"
    transformers.set_seed(3)
    expected = make(tmp_path / "undisturbed", [])
    expected.train()

    transformers.set_seed(3)
    with leaving():
        protect(make(output, [TerminateAt(STOPPED)])).train()
    assert [path.name for path in output.glob("checkpoint-*")] == [f"checkpoint-{STOPPED}"]

    monkeypatch.setattr(FrameworkRun, "_trained", set())
    transformers.set_seed(3)
    resumed = protect(make(output, []))
    resumed.train()
    assert [step for step, _ in losses(resumed)] == list(range(1, STEPS + 1))
    if identical:
        assert losses(resumed) == losses(expected)
