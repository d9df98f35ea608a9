"""The training program of the demo: a small character-level transformer, bit-identical in every run.

It prints one JSON object per line for the demo to read. With --plain it trains without Keepstep and saves nothing.
"""

import argparse
import hashlib
import json
from pathlib import Path
from typing import Final

import torch
from torch import nn

import keepstep

_CONTEXT: Final = 96
_BATCH: Final = 8
_WIDTH: Final = 128
_LAYERS: Final = 4
_WARM_UP_STEPS: Final = 20
_STATE_FILE: Final = "state.pt"


class CharacterTransformer(nn.Module):
    """Predicts the next character from at most `_CONTEXT` earlier ones."""

    def __init__(self, vocabulary_size: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary_size, _WIDTH)
        self.positions = nn.Embedding(_CONTEXT, _WIDTH)
        # Dropout draws from the global generator: a resume that did not restore it would show in the next loss.
        layer = nn.TransformerEncoderLayer(_WIDTH, 4, 4 * _WIDTH, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, _LAYERS, norm=nn.LayerNorm(_WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(_WIDTH, vocabulary_size)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        length = inputs.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        embedded = self.characters(inputs) + self.positions(torch.arange(length))
        output: torch.Tensor = self.head(self.layers(embedded, mask=mask, is_causal=True))
        return output


class Training:
    """Model, optimizer and step; `state` and `load` carry all of it across processes."""

    def __init__(self, text: str) -> None:
        torch.manual_seed(0)
        alphabet = sorted(set(text))
        index = {character: number for number, character in enumerate(alphabet)}
        self._text = torch.tensor([index[character] for character in text])
        self.step = 0
        self.model = CharacterTransformer(len(alphabet))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.1, total_iters=_WARM_UP_STEPS)

    def train_one_step(self) -> float:
        """Train one step and return its loss. The batch follows from the step, so no place in the data is saved."""
        generator = torch.Generator().manual_seed(self.step)
        starts = torch.randint(len(self._text) - _CONTEXT - 1, (_BATCH, 1), generator=generator)
        batch = self._text[starts + torch.arange(_CONTEXT + 1)]
        logits = self.model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.step += 1
        return loss.item()

    def save(self, path: Path) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "random": torch.get_rng_state(),
            "step": self.step,
        }
        torch.save(state, path)

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        torch.set_rng_state(state["random"])
        self.step = state["step"]

    def weights_digest(self) -> str:
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo's transformer.")
    parser.add_argument("--text", type=Path, required=True, help="what to learn")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-every", type=int, default=0, help="steps")
    parser.add_argument("--plain", action="store_true", help="without Keepstep: save nothing, resume nothing")
    arguments = parser.parse_args()
    # With one thread, sums are always added in the same order.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    training = Training(arguments.text.read_text())
    if arguments.plain:
        _train_plainly(training, arguments.steps)
    else:
        _train_safely(training, arguments.steps, arguments.save_every)
    _print_fact(finished=training.step, weights=training.weights_digest())


def _train_plainly(training: Training, steps: int) -> None:
    while training.step < steps:
        _tell_loss(training, training.train_one_step())


def _train_safely(training: Training, steps: int, save_every: int) -> None:
    checkpointer = keepstep.Checkpointer()
    if (path := checkpointer.resume()) is not None:
        training.load(path / _STATE_FILE)
    _print_fact(begun=training.step)
    while training.step < steps and not checkpointer.stopping:
        _tell_loss(training, training.train_one_step())
        last = training.step == steps
        if last or checkpointer.should_save(training.step, every=save_every):
            with checkpointer.save(training.step, kind=keepstep.Kind.FINAL if last else None) as directory:
                training.save(directory / _STATE_FILE)
    checkpointer.finish()


def _tell_loss(training: Training, loss: float) -> None:
    # Hexadecimal keeps every bit.
    _print_fact(step=training.step, loss=loss.hex())


def _print_fact(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    main()
