"""The command line. Each module has the commands of one audience; this one only finds them.

Exit codes: 0 for success, 1 if a problem was found or the work failed, 2 for wrong usage. `keepstep run` exits with the
program's own code.
"""

import os
from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Final

import click

from keepstep_agent import __version__

_MODULES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "run": "run",
        "agent": "agent",
        "restore": "restore",
        "ls": "destination.checkpoints",
        "status": "control",
        "save": "control",
        "ready": "hooks",
        "terminating": "hooks",
        "download": "destination.download",
        "verify": "destination.checkpoints",
        "prune": "destination.checkpoints",
        "du": "destination.storage",
        "report": "destination.report",
        "console": "destination.console",
        "doctor": "destination.checkpoints",
        "plan": "plan",
        "webhook": "webhook",
        "certificates": "webhook",
    }
)
"""The module of each command, in the order in which the help shows them."""


class _Commands(click.Group):
    """Imports a command only when it is used, so that a probe or a hook does not wait for the whole agent to load."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _MODULES:
            return None
        command = getattr(import_module(f"{__name__}.{_MODULES[cmd_name]}"), cmd_name)
        assert isinstance(command, click.Command)
        return command


_CONTEXT: Final = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": 110,
    "color": False if os.environ.get("NO_COLOR") else None,
}


@click.group(cls=_Commands, context_settings=_CONTEXT)
@click.version_option(__version__, prog_name="keepstep")
def cli() -> None:
    """Keep a training job's checkpoints safe in object storage."""
