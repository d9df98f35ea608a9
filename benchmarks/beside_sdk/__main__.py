"""What saves, an end and a resumed start take with Keepstep, and with the checkpointing of the OpenShift AI SDK.

    python -m benchmarks.beside_sdk --sdk DIR [--rounds 5]

In each round, each contestant trains on an empty disk, with a save every few seconds, and gets SIGTERM; then it trains
again, on another empty disk, until its first step. Who begins changes from round to round. Five rounds or more write
benchmarks/BESIDE_SDK.md. Exits 1 if a goal is missed, and 2 without the SDK. A round takes a minute and a half on two
cores.
"""

import argparse
import importlib.metadata
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from benchmarks.beside_sdk.contestants import SAVE_EVERY, Contestant, Keepstep, Life, Sdk
from benchmarks.beside_sdk.report import REPORT, Note, Rounds, Turn, notes_of, page, stalls
from benchmarks.beside_sdk.with_sdk import INSTRUMENTATION
from tests.harness.agent_process import wait_until
from tests.servers.rclone import RcloneServer
from tests.servers.server import Bucket, make_bucket

_ROUNDS: Final = 5
_LAST_SAVE: Final = 4 * SAVE_EVERY
_SIGNAL_STEP: Final = _LAST_SAVE + SAVE_EVERY * 3 // 4
_WAIT_SECONDS: Final = 900.0
_HINT: Final = "git clone https://github.com/opendatahub-io/kubeflow-sdk, and give that directory with --sdk"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.beside_sdk")
    parser.add_argument("--sdk", type=Path, metavar="DIR", help="a checkout of opendatahub-io/kubeflow-sdk")
    parser.add_argument("--rounds", type=int, default=_ROUNDS, help=f"fewer than {_ROUNDS} write no page")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("--rounds must be 1 or more")
    if arguments.sdk is None:
        parser.error(f"the SDK is not on PyPI\nhint: {_HINT}")
    if not (arguments.sdk / INSTRUMENTATION).is_file():
        parser.error(f"{arguments.sdk} has no {INSTRUMENTATION}\nhint: {_HINT}")
    try:
        versions = {name: importlib.metadata.version(name) for name in ("transformers", "torch", "s3fs")}
    except importlib.metadata.PackageNotFoundError as error:
        parser.error(f"{error.name} is not installed\nhint: pip install --group frameworks --group bench")
    # Users' programs do not compile their modules anew at each start.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    contestants: list[Contestant] = [Keepstep(), Sdk(checkout=arguments.sdk.resolve())]
    turns: dict[str, list[Turn]] = {one.name: [] for one in contestants}
    with tempfile.TemporaryDirectory(prefix="beside-") as name:
        folder = Path(name)
        server = RcloneServer(folder / "data")
        server.start()
        try:
            for number in range(arguments.rounds):
                for contestant in contestants[:: -1 if number % 2 else 1]:
                    place = folder / f"{contestant.name}-{number}"
                    place.mkdir()
                    turns[contestant.name].append(_turn(contestant, place, make_bucket(server)))
                    print(contestant.name, turns[contestant.name][-1], file=sys.stderr, flush=True)
        finally:
            server.stop()
    rounds = Rounds(keepstep=turns["Keepstep"], sdk=turns["SDK"])
    text = page(rounds, {"SDK": _version(arguments.sdk), **versions})
    print(text)
    if arguments.rounds >= _ROUNDS:
        REPORT.write_text(text)
    return 0 if all(met for _, _, met in rounds.goals()) else 1


def _version(checkout: Path) -> str:
    found = re.search(r'^__version__ = "([^"]+)"', (checkout / "kubeflow" / "__init__.py").read_text(), re.MULTILINE)
    return found[1] if found else "of no known version"


def _turn(contestant: Contestant, folder: Path, bucket: Bucket) -> Turn:
    """One training until SIGTERM, and another one until its first step."""
    life, resumed = (Life(folder=folder / name, bucket=bucket) for name in ("one", "two"))
    life.output.mkdir(parents=True)
    with contestant.started(life) as process:
        _wait_noted(life, process, _SIGNAL_STEP)
        wait_until(lambda: contestant.is_stored(bucket, _LAST_SAVE), _WAIT_SECONDS, "the last save is stored")
        # Always at the same moment of a step.
        _wait_noted(life, process, _notes(life)[-1].step + 1)
        signalled_at = time.monotonic()
        process.send_signal(signal.SIGTERM)
        code = process.wait(_WAIT_SECONDS)
        to_durable = time.monotonic() - signalled_at
    notes = _notes(life)
    saved_step = notes[-1].step
    assert code == contestant.exit_code, f"it ended with {code}:\n{life.logs()}"
    assert contestant.is_stored(bucket, saved_step), f"step {saved_step} is not stored:\n{life.logs()}"
    first_stall, *later_stalls = stalls(notes, SAVE_EVERY)
    resumed.output.mkdir(parents=True)
    started_at = time.monotonic()
    with contestant.started(resumed) as process:
        _wait_noted(resumed, process, saved_step + 1)
    first, *_ = _notes(resumed)
    assert first.step == saved_step + 1, f"it begins with step {first.step}, not {saved_step + 1}:\n{resumed.logs()}"
    return Turn(
        first_stall=first_stall,
        later_stall=statistics.median(later_stalls),
        to_durable=to_durable,
        resumed_start=first.seconds - started_at,
    )


def _notes(life: Life) -> list[Note]:
    return notes_of(life.notes.read_text()) if life.notes.exists() else []


def _wait_noted(life: Life, process: "subprocess.Popen[bytes]", step: int) -> None:
    """Until that step has begun."""

    def noted() -> bool:
        assert process.poll() is None, f"it ended with {process.returncode}:\n{life.logs()}"
        return any(note.step >= step for note in _notes(life))

    wait_until(noted, _WAIT_SECONDS, f"step {step} begins")


if __name__ == "__main__":
    sys.exit(main())
