"""`mooring run`: runs a program with an agent beside it, on a laptop, bare metal or Slurm.

Also prepares autoload: the environment for `--autoload`, and the files for a pod whose trainer's image has no Mooring.
"""

import asyncio
import os
import shutil
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from mooring_agent.adapters.volume.errors import folder_error
from mooring_agent.cli.agent_call import CALL_TIMEOUT_SECONDS, agent_answers, agent_stub
from mooring_agent.cli.formatting import errors_reported
from mooring_agent.cli.store_options import environment_of, setting_options, settings_from
from mooring_api import names
from mooring_api.v1 import agent_pb2

_FOLDER = Path("autoload", "path")


def with_autoload(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with the client's autoload folder first on PYTHONPATH."""
    folder = str(_package("mooring") / _FOLDER)
    # An empty entry would mean the working directory.
    users = environment.get("PYTHONPATH")
    return {**environment, "PYTHONPATH": os.pathsep.join([folder, users]) if users else folder}


def copy_autoload(to: Path) -> None:
    """Make `to` a folder for PYTHONPATH with everything that another interpreter needs, except grpcio and protobuf.

    Compiled files are not copied: they are for this version of Python. Raises MooringError.
    """
    try:
        for name in ("mooring", "mooring_api"):
            shutil.copytree(
                _package(name),
                to / name,
                dirs_exist_ok=True,
                ignore=shutil.ignore_patterns("__pycache__"),
                copy_function=shutil.copyfile,
            )
        for file in (to / "mooring" / _FOLDER).iterdir():
            shutil.copyfile(file, to / file.name)
    except shutil.Error as error:
        raise folder_error(OSError(0, str(error)), f"cannot copy autoload to {to}") from error
    except OSError as error:
        raise folder_error(error, f"cannot copy autoload to {to}") from error


def _package(name: str) -> Path:
    """Return a package's folder without importing it: the agent never imports the client."""
    found = find_spec(name)
    assert found is not None, "the agent's distribution requires it"
    assert found.submodule_search_locations
    return Path(found.submodule_search_locations[0])


_DEFAULTS = {
    "volume": names.RUN_VOLUME,
    "log_format": "console",
    # There is no kubelet that evicts: a disk that is 95 % full may be filled further.
    "eviction_threshold_percent": 0.0,
}


@click.command()
@setting_options
@click.option("--restore/--no-restore", "wants_restore", default=True, help="Fetch the newest checkpoint first.")
@click.option(
    "--autoload", "wants_autoload", is_flag=True, help="Protect a Python program's framework, see docs/autoload.md."
)
@click.argument("command", nargs=-1, required=True, metavar="-- CMD…")
def run(wants_restore: bool, wants_autoload: bool, command: tuple[str, ...], **options: Any) -> None:
    """Run a program with an agent beside it.

    Restores the newest checkpoint, runs the program, and drains when it has ended. On a termination notice the program
    saves just in time. Exits with the program's code, or with 75 if the program succeeded but its newest checkpoint is
    not durable.
    """
    with errors_reported():
        settings = settings_from(options, defaults=_DEFAULTS)
        from mooring_agent.runtime.engine.telemetry import configure_logs
        from mooring_agent.runtime.process.runner import Runner

        configure_logs(settings.log_format)
        _make_directory(Path(settings.checkpoint_directory))

        def notify(grace_seconds: float, source: str, trainers_gone: bool) -> None:
            with agent_stub(settings.socket) as stub:
                request = agent_pb2.NotifyTerminationRequest(
                    grace_seconds=grace_seconds, source=source, trainers_gone=trainers_gone
                )
                stub.NotifyTermination(request, timeout=CALL_TIMEOUT_SECONDS)

        answers = partial(agent_answers, settings.socket)
        environment = {
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(settings.termination.grace_seconds)),
            names.ENV_GRPC_FORK_HANDLERS: "0",
            **os.environ,
            **environment_of(settings),
        }
        if wants_autoload:
            environment = with_autoload(environment)

        async def whole_run() -> int:
            runner = Runner(settings, command, environment=environment, notify=notify, answers=answers)
            return await runner.run(restore=wants_restore)

        code = asyncio.run(whole_run())
    raise SystemExit(code)


def _make_directory(directory: Path) -> None:
    """Make the directory, because the program may look for it before anything is written there. Raises MooringError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise folder_error(error, f"cannot make {directory}") from error
