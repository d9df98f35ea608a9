"""Hugging Face's Trainer on several ranks: stop it at any moment, start it again, and the result is bit-identical.

torchrun --nproc-per-node 2 examples/hugging_face.py
"""

import argparse
import os
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

import keepstep


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sequences that count upwards, each from another number and by another stride."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (index + torch.arange(32) * (index % 7 + 1)) % 64
        return {"input_ids": tokens, "labels": tokens}


class PrintLoss(TrainerCallback):  # type: ignore[misc]
    """One line for each step."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if state.is_world_process_zero and "loss" in logs:
            print(f"step={state.global_step} loss={logs['loss']!r}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--accumulation", type=int, default=3)
    options = parser.parse_args()

    set_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        attention_dropout=0.1,
    )
    arguments = TrainingArguments(
        output_dir=os.environ.get("KEEPSTEP_CHECKPOINT_DIRECTORY", "checkpoints"),
        use_cpu=not torch.cuda.is_available(),
        max_steps=options.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=options.accumulation,
        learning_rate=1e-3,
        dataloader_num_workers=2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=options.save_every,
        save_steps=options.save_every,
        save_total_limit=1,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=LlamaForCausalLM(config),
        args=arguments,
        train_dataset=Counting(480),
        eval_dataset=Counting(64),
        callbacks=[PrintLoss()],
    )
    keepstep.protect(trainer)
    trainer.train()


if __name__ == "__main__":
    main()
