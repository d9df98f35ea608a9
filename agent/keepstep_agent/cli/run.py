"""`keepstep run`: runs a program with an agent beside it, on a laptop, bare metal or Slurm."""

import asyncio
import os
import secrets
from functools import partial
from pathlib import Path
from typing import Any

import click

from keepstep_agent.adapters.volume.announced_files import resolve_path
from keepstep_agent.adapters.volume.errors import folder_error
from keepstep_agent.cli.agent_call import CALL_TIMEOUT_SECONDS, agent_answers, agent_stub
from keepstep_agent.cli.autoload import autoload_folder, with_autoload
from keepstep_agent.cli.formatting import errors_reported
from keepstep_agent.cli.slurm import launcher_problem, slurm_defaults, slurm_facts
from keepstep_agent.cli.store_options import environment_of, setting_options, settings_from
from keepstep_agent.core.errors import KeepstepError
from keepstep_api import names
from keepstep_api.v1 import agent_pb2

_DEFAULTS = {
    "volume": names.RUN_VOLUME,
    "log_format": "console",
    # There is no kubelet that evicts: a disk that is 95 % full may be filled further.
    "eviction_threshold_percent": 0.0,
}


@click.command()
@setting_options
@click.option(
    "--autoload", "wants_autoload", is_flag=True, help="Protect a Python program's framework, see docs/autoload.md."
)
@click.option(
    "--take-over", is_flag=True, help="Begin although another run is alive at the destination: this one replaces it."
)
@click.argument("command", nargs=-1, required=True, metavar="-- CMD…")
def run(wants_autoload: bool, take_over: bool, command: tuple[str, ...], **options: Any) -> None:
    """Run a program with an agent beside it.

    Restores the newest checkpoint (see --restore), runs the program, and drains when it has ended. KEEPSTEP_RESUME
    tells the program where a restored checkpoint lies. On a termination notice the program saves just in time. Exits
    with the program's code, or with 75 if the program succeeded or was told to stop, and its newest checkpoint is not
    durable.
    """
    with errors_reported():
        settings = settings_from(options, defaults={**_DEFAULTS, **slurm_defaults(os.environ)})
        import structlog

        from keepstep_agent.adapters.volume.shared_folders import VOLUME_MODE
        from keepstep_agent.runtime.engine.logs import configure_logs
        from keepstep_agent.runtime.process.autoload_check import AutoloadCheck
        from keepstep_agent.runtime.process.run_lock import held_volume
        from keepstep_agent.runtime.process.runner import Runner

        configure_logs(settings.log_format)
        log = structlog.get_logger("keepstep.run")
        if facts := slurm_facts(os.environ):
            log.info(
                "run.slurm",
                **facts,
                volume=settings.volume,
                attempt=settings.attempt,
                grace_seconds=settings.termination.grace_seconds,
            )
        if problem := launcher_problem(command):
            log.warning("run.launcher", problem=problem)
        # Not with the umask, which may let others of the user's group replace what is on it.
        _make_directory(Path(settings.volume), VOLUME_MODE)
        _make_directory(Path(settings.checkpoint_directory))
        # Where nobody reads the error, the agent moves a link aside that leads off the volume.
        resolve_path(Path(settings.volume), settings.checkpoint_directory)

        def notify(request: agent_pb2.NotifyTerminationRequest) -> None:
            with agent_stub(settings.socket) as stub:
                stub.NotifyTermination(request, timeout=CALL_TIMEOUT_SECONDS)

        def is_stuck() -> bool:
            try:
                with agent_stub(settings.socket) as stub:
                    status = stub.GetStatus(agent_pb2.GetStatusRequest(), timeout=CALL_TIMEOUT_SECONDS)
            except KeepstepError:
                return False
            return bool(status.progress.stuck)

        answers = partial(agent_answers, settings.socket)
        environment = {
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(settings.termination.grace_seconds)),
            names.ENV_GRPC_FORK_HANDLERS: "0",
            **os.environ,
            **environment_of(settings),
            names.ENV_START: secrets.token_hex(8),
            names.ENV_WATCHED: ":".join(str(Path(directory).absolute()) for directory in settings.watch),
        }
        # That of a run around this one.
        environment.pop(names.ENV_RESUME, None)
        check = None
        if wants_autoload:
            check = AutoloadCheck(Path(settings.volume), folder=autoload_folder(), command=command)
            environment = with_autoload(environment) | {names.ENV_AUTOLOAD_PROCESSES: check.file}

        async def whole_run() -> int:
            runner = Runner(
                settings,
                command,
                environment=environment,
                notify=notify,
                answers=answers,
                is_stuck=is_stuck,
                take_over=take_over,
                autoload_check=check,
            )
            return await runner.run()

        with held_volume(settings):
            code = asyncio.run(whole_run())
    raise SystemExit(code)


def _make_directory(directory: Path, mode: int = 0o777) -> None:
    """Make the directory: the program may look for it before anything is written there. Raises KeepstepError."""
    try:
        directory.mkdir(mode, parents=True, exist_ok=True)
    except OSError as error:
        raise folder_error(error, f"cannot make {directory}") from error
