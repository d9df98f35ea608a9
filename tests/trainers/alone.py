"""Runs a trainer's own file as __main__ without its lines of Keepstep, from its framework's newest checkpoint.

alone.py examples/x.py <its arguments>
"""

import os
import runpy
import sys
from pathlib import Path

CHECKPOINTS = Path(os.environ["KEEPSTEP_CHECKPOINT_DIRECTORY"])


def resume_by_itself(trainer: str) -> None:
    """Name the checkpoint to those that do not look for one."""
    if trainer in ("hugging_face", "trl_sft"):
        from transformers import Trainer
        from transformers.trainer_utils import get_last_checkpoint

        train = Trainer.train
        Trainer.train = lambda self: train(self, resume_from_checkpoint=get_last_checkpoint(CHECKPOINTS))
    elif trainer == "lightning_trainer":
        import lightning.pytorch as lightning

        fit = lightning.Trainer.fit
        newest = max(CHECKPOINTS.glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
        lightning.Trainer.fit = lambda self, module: fit(self, module, ckpt_path=newest)
    elif trainer == "accelerate_loop":
        from accelerate import Accelerator

        load_state = Accelerator.load_state

        def load_and_count_on(self: Accelerator) -> None:
            load_state(self)
            # It leaves this to its users.
            newest = max(int(path.name.rpartition("_")[2]) for path in CHECKPOINTS.glob("checkpoints/checkpoint_*"))
            self.project_configuration.iteration = newest + 1

        Accelerator.load_state = load_and_count_on


if __name__ == "__main__":
    program = Path(sys.argv[1])
    lines = program.read_text().splitlines(keepends=True)
    stripped = Path(f"{program.stem}.{os.environ['RANK']}.py")
    stripped.write_text("".join(line for line in lines if "keepstep" not in line))
    resume_by_itself(program.stem)
    sys.argv = [str(stripped), *sys.argv[2:]]
    runpy.run_path(str(stripped), run_name="__main__")
    assert "keepstep" not in sys.modules
