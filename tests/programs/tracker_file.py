"""`iter_0000010/` and `latest_checkpointed_iteration.txt`, which names it, as in Megatron."""

from pathlib import Path

from tests.programs.training import Loaded, State, as_zip, done, from_zip, run, write

TRACKER = "latest_checkpointed_iteration.txt"


def load(output: Path) -> Loaded | None:
    if not (output / TRACKER).exists():
        return None
    iteration = int((output / TRACKER).read_text())
    folder = output / f"iter_{iteration:07}"
    step, state = from_zip((folder / "mp_rank_00" / "model_optim_rng.pt").read_bytes())
    assert step == iteration, "it is of another step"
    return step, state


def save(output: Path, step: int, state: State) -> None:
    write(output / f"iter_{step:07}" / "mp_rank_00" / "model_optim_rng.pt", as_zip(step, state))
    write(output / TRACKER, str(step).encode())


if __name__ == "__main__":
    done(run(load, save))
