"""`checkpoints/outputs/step-N/__0_0.distcp` and `.metadata`, which is written last, as PyTorch's DCP does."""

from pathlib import Path

from tests.programs.training import Loaded, State, as_json, done, from_json, newest, number_in, run, write

FOLDER = "checkpoints/outputs"


def load(output: Path) -> Loaded | None:
    folder = newest(output, f"{FOLDER}/step-*")
    if folder is None:
        return None
    assert int((folder / ".metadata").read_text()) == number_in(folder), "the metadata are of another step"
    step, state = from_json((folder / "__0_0.distcp").read_bytes())
    assert step == number_in(folder), "the shard is of another step"
    return step, state


def save(output: Path, step: int, state: State) -> None:
    folder = output / FOLDER / f"step-{step}"
    write(folder / "__0_0.distcp", as_json(step, state))
    write(folder / ".metadata.tmp", str(step).encode())
    (folder / ".metadata.tmp").replace(folder / ".metadata")


if __name__ == "__main__":
    done(run(load, save))
