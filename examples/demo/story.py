"""Plays the demo and checks its claims: train, get preempted, lose the disk, resume, and compare every bit.

Checks each claim from outside: by exit codes, by the bucket, and by what the program printed. Must not know torch or
the client; the program is an ordinary child process. Prints one line per event, with the seconds since the start.
"""

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from examples.demo.processes import (
    LogLine,
    TrainingRun,
    child,
    environment_for,
    find_rclone,
    read_along,
    read_log,
    s3_server,
)
from examples.demo.timeline import Timeline

from keepstep_agent.core.errors import ErrorKind, KeepstepError
from keepstep_api.names import JUST_IN_TIME_EXIT_CODE

_STEPS: Final = 100
_SAVE_EVERY: Final = 20
_INTERRUPT_AFTER_STEP: Final = 46
"""Not close to the periodic saves before and after it."""
_BUCKET: Final = "keepstep-demo"
_DESTINATION: Final = f"s3://{_BUCKET}/runs/first"
_LIMIT_SECONDS: Final = 600.0
_PROGRAM: Final = Path(__file__).with_name("train.py")
_PACKAGES: Final = ("keepstep", "keepstep_agent", "keepstep_api")


class ClaimError(Exception):
    """A claim of the demo did not hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """The folder, output and environment of one demo."""

    folder: Path
    timeline: Timeline
    environment: dict[str, str]

    @property
    def volume(self) -> Path:
        return self.folder / "volume"

    @property
    def text(self) -> Path:
        return self.folder / "text.txt"

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"


def run_demo(*, keep: bool) -> int:
    """Run the demo. Returns 0 if every claim held, else 1.

    On success its folder is removed, unless `keep`. Raises KeepstepError if the demo cannot start.
    """
    _check_packages()
    timeline = Timeline()
    folder = Path(tempfile.mkdtemp(prefix="keepstep-demo-"))
    timeline.plain("A training job is preempted and loses its disk. Is anything of its work lost?", style="bold")
    try:
        with timeline.going_on():
            claims = _play(folder, timeline)
    except ClaimError as failure:
        timeline.plain(f"\nThis did not hold: {failure}", style="bold red")
        timeline.plain(f"What was written and logged is in {folder}")
        return 1
    except BaseException:
        timeline.plain(f"\nThe demo was cut short. What was written and logged is in {folder}")
        raise
    timeline.heading("What held")
    for claim in claims:
        timeline.plain(f"  ✓ {claim}", style="green")
    if keep:
        timeline.plain(f"\nKept: bucket, logs and checkpoints in {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _check_packages() -> None:
    missing = [name for name in ("torch", "numpy") if importlib.util.find_spec(name) is None]
    if find_rclone() is None:
        missing.append("rclone")
    if missing:
        raise KeepstepError(
            ErrorKind.BAD_CONFIGURATION,
            f"the demo trains a real model and serves a real bucket, and needs {' and '.join(missing)}",
            hint="start it by `make demo`, which installs them",
        )


def _play(folder: Path, timeline: Timeline) -> list[str]:
    """Play the whole story, and return the claims that held, in words."""
    bucket = folder / "bucket"
    (bucket / _BUCKET).mkdir(parents=True)
    keys = ("demo", "demo-secret")
    server = s3_server(
        bucket, log=folder / "s3-server.log", access_key=keys[0], secret_key=keys[1], limit_seconds=_LIMIT_SECONDS
    )
    with server as url:
        stage = _Stage(folder=folder, timeline=timeline, environment=environment_for(folder, url, *keys))
        timeline.say(f"an S3 server runs on {url.removeprefix('http://')} (rclone serve s3)")
        characters = _write_text(stage.text)
        timeline.heading("The expected result")
        undisturbed = _train_undisturbed(stage, characters)
        timeline.heading("The same training under `keepstep run`, and a preemption")
        interrupted = _train_until_preempted(stage)
        timeline.heading("A new machine")
        resumed = _train_on(stage, interrupted.last_step)
        verified = _verify(stage)
        timeline.say(f"`keepstep verify`: read {verified} checkpoints back, every byte is as it was written")
        identical = _compare(undisturbed, interrupted, resumed)
    step = interrupted.last_step
    return [
        f"the just-in-time save is of step {step}, the very step at which the run stopped",
        "it was committed in the bucket before `keepstep run` ended",
        f"`keepstep run` gave the program's exit code, {JUST_IN_TIME_EXIT_CODE}: terminated, not done",
        f"with nothing but the bucket left, training went on from step {step}",
        f"all {identical} losses and the final weights are bit-identical to the undisturbed run's",
        f"all {verified} checkpoints in the bucket are intact",
    ]


def _write_text(path: Path) -> int:
    """Copy the source text of the installed packages into one file, and return the number of characters.

    So all runs train on the same text, even if the source is edited meanwhile.
    """
    texts = []
    for name in _PACKAGES:
        found = importlib.util.find_spec(name)
        assert found is not None
        for place in found.submodule_search_locations or ():
            texts += [source.read_text() for source in sorted(Path(place).rglob("*.py"))]
    path.write_text("\n".join(texts))
    return sum(map(len, texts))


def _train_undisturbed(stage: _Stage, characters: int) -> TrainingRun:
    stage.timeline.say(f"{_STEPS} steps of a small transformer on {characters:,} characters of source text")
    stage.timeline.say("without Keepstep, and nobody disturbs it")
    program = child(
        [*_trainer(stage), "--plain"],
        log=stage.log("undisturbed"),
        environment=stage.environment,
        limit_seconds=_LIMIT_SECONDS,
    )
    with program as running:
        trained = read_along(running, _shower(stage.timeline))
    _claim(trained.exit_code == 0 and len(trained.losses) == _STEPS, "the undisturbed training runs to its end")
    stage.timeline.say(f"loss {trained.loss(1):.4f} → {trained.loss(_STEPS):.4f}; noted every bit of every loss")
    return trained


def _train_until_preempted(stage: _Stage) -> TrainingRun:
    stage.timeline.say(f"saves every {_SAVE_EVERY} steps; the agent beside it uploads each save")
    show = _shower(stage.timeline)
    with _keepstep_run(stage, "preempted") as running:

        def on_step(step: int, loss: float) -> None:
            show(step, loss)
            if step == _INTERRUPT_AFTER_STEP:
                stage.timeline.say(f"step {step}: SIGTERM, as when a machine is taken away", style="yellow")
                running.terminate()

        trained = read_along(running, on_step)
    _claim(bool(trained.losses), f"the training begins ({stage.log('preempted')} says why not)")
    # `keepstep run` has ended, so what is in the bucket was there before its end.
    committed = _keepstep(stage, "ls", _DESTINATION)["checkpoints"]
    lines = read_log(stage.log("preempted"))
    step = trained.last_step
    _claim(
        any(row["kind"] == "just-in-time" and row["step"] == step for row in committed),
        f"the just-in-time save of step {step}, the last one trained, is committed when `keepstep run` ends",
    )
    _tell_preemption(stage.timeline, lines, step)
    stage.timeline.say(f"`keepstep run` has drained and ended with exit code {trained.exit_code}", at=lines[-1].at)
    _claim(
        trained.exit_code == JUST_IN_TIME_EXIT_CODE,
        f"`keepstep run` exits with {JUST_IN_TIME_EXIT_CODE} (it was {trained.exit_code})",
    )
    return trained


def _tell_preemption(timeline: Timeline, lines: list[LogLine], step: int) -> None:
    noticed = _logged(lines, "run.signal")
    announced = _logged(lines, "checkpoint.announced", step=step)
    committed = _logged(lines, "checkpoint.committed", step=step)
    since = f"{step % _SAVE_EVERY} steps after the last periodic save"
    timeline.say(f"step {step}: saved just in time, {since}", style="bold", at=announced.at)
    size = f"{committed.fields['size_bytes'] / 2**20:.1f} MiB"
    waited = f"{committed.at - noticed.at:.1f} s after the signal"
    timeline.say(f"its {size} are committed in the bucket, {waited}", style="bold", at=committed.at)


def _logged(lines: list[LogLine], event: str, **fields: object) -> LogLine:
    for line in lines:
        if line.event == event and fields.items() <= line.fields.items():
            return line
    raise ClaimError(f"Keepstep's log tells of {event} {fields or ''}")


def _train_on(stage: _Stage, step: int) -> TrainingRun:
    shutil.rmtree(stage.volume)
    stage.timeline.say("the local disk is gone: deleted the volume with all it held", style="yellow")
    with _keepstep_run(stage, "resumed") as running:
        trained = read_along(running, _shower(stage.timeline))
    _claim(trained.begun == step, f"training goes on from step {step} (it went on from {trained.begun})")
    restored = _logged(read_log(stage.log("resumed")), "restore.done")
    stage.timeline.say(f"restored checkpoint-{restored.fields['step']} from the bucket", style="bold", at=restored.at)
    _claim(trained.exit_code == 0, f"the resumed training ends with exit code 0 (it was {trained.exit_code})")
    stage.timeline.say(f"finished: step {trained.last_step}, loss {trained.loss(trained.last_step):.4f}")
    return trained


def _compare(undisturbed: TrainingRun, interrupted: TrainingRun, resumed: TrainingRun) -> int:
    """Compare the losses and final weights. Returns how many losses were compared. Raises ClaimError."""
    _claim(not interrupted.losses.keys() & resumed.losses.keys(), "no step is trained twice")
    together = interrupted.losses | resumed.losses
    for step, loss in undisturbed.losses.items():
        found = together.get(step, "no loss")
        _claim(found == loss, f"step {step} has the same loss to the last bit ({found} instead of {loss})")
    _claim(together.keys() == undisturbed.losses.keys(), f"{_STEPS} steps are trained (it was {len(together)})")
    _claim(
        bool(resumed.weights) and resumed.weights == undisturbed.weights,
        f"the final weights are the same to the last bit (SHA-256 {resumed.weights} instead of {undisturbed.weights})",
    )
    return len(together)


def _verify(stage: _Stage) -> int:
    """Verify all checkpoints in the bucket, and return how many there are. Raises ClaimError if one is damaged."""
    checkpoints = _keepstep(stage, "verify", _DESTINATION, "--all")["checkpoints"]
    for checkpoint in checkpoints:
        _claim(not checkpoint["problems"], f"step {checkpoint['step']} is intact ({checkpoint['problems']})")
    return len(checkpoints)


def _trainer(stage: _Stage) -> list[str]:
    return [sys.executable, str(_PROGRAM), "--text", str(stage.text), "--steps", str(_STEPS)]


def _keepstep_run(stage: _Stage, name: str) -> Any:
    command = [sys.executable, "-m", "keepstep_agent", "run", "--to", _DESTINATION, "--volume", str(stage.volume)]
    command += ["--log-format", "json", "--", *_trainer(stage), "--save-every", str(_SAVE_EVERY)]
    return child(command, log=stage.log(name), environment=stage.environment, limit_seconds=_LIMIT_SECONDS)


def _keepstep(stage: _Stage, *arguments: str) -> Any:
    """Return a command's JSON output, whatever its exit code. Raises ClaimError if it printed none."""
    with stage.log(arguments[0]).open("ab") as log:
        done = subprocess.run(
            [sys.executable, "-m", "keepstep_agent", *arguments, "--json"],
            stdout=subprocess.PIPE,
            stderr=log,
            env=stage.environment,
            timeout=_LIMIT_SECONDS,
            check=False,
        )
    try:
        return json.loads(done.stdout)
    except ValueError:
        raise ClaimError(f"`keepstep {arguments[0]}` answers (exit code {done.returncode})") from None


def _shower(timeline: Timeline) -> Callable[[int, float], None]:
    return lambda step, loss: timeline.now(f"step {step} of {_STEPS}, loss {loss:.4f}")


def _claim(held: bool, claim: str) -> None:
    if not held:
        raise ClaimError(claim)
