"""`keepstep agent`: the sidecar's own command."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import click

from keepstep_agent.adapters.volume.shared_folders import make_shared_folders
from keepstep_agent.cli.formatting import errors_reported
from keepstep_agent.cli.store_options import setting_options, settings_from
from keepstep_agent.config import unknown_variables


@click.command()
@setting_options
@click.option("--fresh", is_flag=True, help="Forget earlier termination notices: the pod is new.")
@click.option("--parent-pid", type=int, default=None, hidden=True, help="Exit when the process with this id is gone.")
@click.option("--begin-when-told", is_flag=True, hidden=True, help="Wait for a byte on standard input, or its end.")
def agent(fresh: bool, parent_pid: int | None, begin_when_told: bool, **options: Any) -> None:
    """Run the agent beside a trainer, as a sidecar container does.

    When it is terminated, it makes durable what fits into the grace period, then exits.
    """
    # Slurm sends these to every process of a job, but they are meant for the trainer.
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    # SIGTERM waits until the agent can drain: an earlier process may have left work that fits into the grace period.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    with errors_reported():
        settings = settings_from(options)
        # Imported here, so that the other commands do not wait for the whole agent to load.
        import structlog
        import uvloop

        from keepstep_agent.adapters.open_store import load_modules
        from keepstep_agent.adapters.priority import set_priority
        from keepstep_agent.runtime.engine.logs import configure_logs
        from keepstep_agent.runtime.process.app import run_agent

        if begin_when_told:
            load_modules(settings.store.destination)
            if not sys.stdin.buffer.read(1):
                os._exit(0)
        configure_logs(settings.log_format)
        log = structlog.get_logger("keepstep.agent")
        for line in unknown_variables(os.environ):
            log.warning(
                "settings.unknown_variable", problem=line, hint="every setting is described in docs/settings.md"
            )
        make_shared_folders(Path(settings.volume), Path(settings.checkpoint_directory))
        set_priority(nice=settings.nice, io_priority=settings.io_priority)
        code = uvloop.run(run_agent(settings, fresh=fresh, parent_pid=parent_pid))
    # A normal exit would join threads that still hash a file, and SIGKILL may be near. Every log line is flushed
    # already.
    os._exit(code)
