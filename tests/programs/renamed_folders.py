"""`N.tmp/d/HASH` and `N.tmp/manifest`, then the folder is renamed to `N`, as Orbax does."""

import hashlib
import json
from pathlib import Path

from tests.programs.training import Loaded, State, as_json, done, from_json, run, write


def load(output: Path) -> Loaded | None:
    folders = [path for path in output.iterdir() if path.name.isdigit()]
    if not folders:
        return None
    folder = max(folders, key=lambda path: int(path.name))
    (name,) = json.loads((folder / "manifest").read_bytes())
    step, state = from_json((folder / "d" / name).read_bytes())
    assert step == int(folder.name), "it is of another step"
    return step, state


def save(output: Path, step: int, state: State) -> None:
    content, aside = as_json(step, state), output / f"{step}.tmp"
    name = hashlib.sha256(content).hexdigest()
    write(aside / "d" / name, content)
    write(aside / "manifest", json.dumps([name]).encode())
    aside.rename(output / str(step))


if __name__ == "__main__":
    done(run(load, save))
