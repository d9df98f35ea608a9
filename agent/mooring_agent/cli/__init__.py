"""The command line. Each module has the commands of one audience; this one only gathers them.

Exit codes: 0 fine, 1 a problem was found or the work failed, 2 wrong usage; `mooring run` gives the program's own.
"""

import click

from mooring_agent import __version__
from mooring_agent.cli.agent import agent
from mooring_agent.cli.control import ready, save, status, terminating
from mooring_agent.cli.demo import demo
from mooring_agent.cli.destination import ls, prune, verify
from mooring_agent.cli.doctor import doctor
from mooring_agent.cli.restore import restore
from mooring_agent.cli.run import run
from mooring_agent.cli.webhook import webhook


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="mooring")
def cli() -> None:
    """Keeps a training job's work safe when its pod is not."""


for command in (run, agent, restore, ls, status, save, ready, terminating, verify, prune, doctor, demo, webhook):
    cli.add_command(command)
