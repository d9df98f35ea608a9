"""The `keepstep` command: prints the version itself and leaves everything else to the agent's package.

The trainer's package installs the command, and has to do without the agent's. This module never imports `keepstep`,
which would slow down every probe and hook of a pod, and imports the agent's package only when a command needs it.
"""

import importlib
import sys

from keepstep_api import __version__


def main() -> None:
    if sys.argv[1:] == ["--version"]:
        print(f"keepstep, version {__version__}")  # noqa: T201 - what the command is asked for
        return
    try:
        agent = importlib.import_module("keepstep_agent.__main__")
    except ModuleNotFoundError as error:
        if error.name != "keepstep_agent":
            # A bug of ours, or a broken installation: the traceback says more.
            raise
        sys.stderr.write("error: the command line is in the agent's package\nhint: pip install keepstep-agent\n")
        sys.exit(2)
    agent.main()
