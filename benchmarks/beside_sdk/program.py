"""A training with Hugging Face's Trainer that mentions neither contestant, and notes when its steps begin and end.

    python -m benchmarks.beside_sdk.program OUTPUT NOTES SAVE_EVERY

A checkpoint is 85 MB in the six files that the Trainer writes. It trains until it is stopped. Each line of NOTES is
`begin` or `end`, a step, and the seconds of the machine's monotonic clock: a step begins with its forward pass, after
all callbacks, and ends with its optimizer's step, before they are asked whether to save.
"""

import sys
import time
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from benchmarks.framework_saves.program import Model

LAYERS: Final = 27
SIDE: Final = 512
ROWS: Final = 192
"""Of a batch: a step takes about 0.2 s."""
_FOR_EVER: Final = 1_000_000


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 1_000 * ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((SIDE,), (index % 7) / 7), "labels": torch.zeros(1)}


def main() -> None:
    output, notes_path, save_every = sys.argv[1:]
    torch.manual_seed(7)
    # Two would wait for each other at each layer whenever something else has one of their cores.
    torch.set_num_threads(1)
    arguments = transformers.TrainingArguments(
        output_dir=output,
        use_cpu=True,
        max_steps=_FOR_EVER,
        per_device_train_batch_size=ROWS,
        save_steps=int(save_every),
        save_total_limit=3,
        report_to="none",
        disable_tqdm=True,
        logging_steps=_FOR_EVER,
    )
    with Path(notes_path).open("a", buffering=1) as notes:

        def note(what: str, step: int) -> None:
            notes.write(f"{what} {step} {time.monotonic()}\n")

        class NoteEnds(transformers.TrainerCallback):  # type: ignore[misc]  # may not be installed where mypy is
            def on_optimizer_step(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
                note("end", state.global_step + 1)

        model = Model(LAYERS, SIDE)
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Rows(), callbacks=[NoteEnds()])
        model.register_forward_pre_hook(lambda *_: note("begin", trainer.state.global_step + 1))
        trainer.train()


if __name__ == "__main__":
    main()
