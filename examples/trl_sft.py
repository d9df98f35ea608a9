"""Supervised fine-tuning with TRL's SFTTrainer on several ranks, stopped and resumed without losing a bit.

torchrun --nproc-per-node 2 examples/trl_sft.py
"""

import argparse
import os
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback, set_seed
from trl import SFTConfig, SFTTrainer

import keepstep

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "plus", "times", "is"]
SPECIAL = ["<pad>", "<eos>", "<unk>"]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A word is a token."""
    vocabulary = {word: number for number, word in enumerate(SPECIAL + WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def make_dataset() -> Dataset:
    """What one digit plus or times another is, digit by digit."""
    texts = []
    for first in range(10):
        for second in range(10):
            for operation, result in (("plus", first + second), ("times", first * second)):
                digits = " ".join(WORDS[int(digit)] for digit in str(result))
                texts.append({"text": f"{WORDS[first]} {operation} {WORDS[second]} is {digits}"})
    return Dataset.from_list(texts)


class PrintLoss(TrainerCallback):  # type: ignore[misc]
    """One line for each step."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if state.is_world_process_zero and "loss" in logs:
            print(f"step={state.global_step} loss={logs['loss']!r}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=20)
    options = parser.parse_args()

    set_seed(0)
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        attention_dropout=0.1,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    arguments = SFTConfig(
        output_dir=os.environ.get("KEEPSTEP_CHECKPOINT_DIRECTORY", "checkpoints"),
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
        max_steps=options.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        dataloader_num_workers=2,
        logging_steps=1,
        save_steps=options.save_every,
        save_total_limit=1,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = SFTTrainer(
        model=LlamaForCausalLM(config),
        args=arguments,
        train_dataset=make_dataset(),
        processing_class=tokenizer,
        callbacks=[PrintLoss()],
    )
    keepstep.protect(trainer)
    trainer.train()


if __name__ == "__main__":
    main()
