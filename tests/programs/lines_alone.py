"""`history.jsonl`, to which each save adds a line, and nothing else."""

from pathlib import Path

from tests.programs.training import Loaded, SlowFile, State, as_json, done, from_json, run


def load(output: Path) -> Loaded | None:
    path = output / "history.jsonl"
    content = path.read_bytes() if path.exists() else b""
    # Half a line at the end is what a kill leaves, and what readers of such files expect.
    lines = [line for line in content.splitlines(keepends=True) if line.endswith(b"\n")]
    path.write_bytes(b"".join(lines))
    return from_json(lines[-1]) if lines else None


def save(output: Path, step: int, state: State) -> None:
    with SlowFile(output / "history.jsonl", "ab") as file:
        file.write(as_json(step, state) + b"\n")


if __name__ == "__main__":
    done(run(load, save))
