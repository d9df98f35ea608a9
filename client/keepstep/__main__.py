"""Hands `python -m keepstep` over to the command `keepstep`, which is installed with the agent.

The agent may be in an environment of its own, and its packages need not be in the program's.
"""

import os
import shutil
import sys
from pathlib import Path


def main() -> None:
    beside = Path(sys.executable).parent
    command = shutil.which("keepstep", path=os.pathsep.join([str(beside), os.environ.get("PATH", os.defpath)]))
    if command is None:
        sys.stderr.write(
            "error: there is no command keepstep on the PATH\n"
            "hint: it comes with the agent: uv tool install keepstep-agent, or pipx install keepstep-agent\n"
        )
        sys.exit(2)
    os.execv(command, ["keepstep", *sys.argv[1:]])  # noqa: S606 - what was asked for


if __name__ == "__main__":
    main()
