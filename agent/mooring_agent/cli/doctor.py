"""`mooring doctor`: is this destination fit for checkpoints, and what does it really enforce?"""

import asyncio
import json
import sys

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mooring_agent.cli.reporting import errors_reported
from mooring_agent.cli.store_options import store_options
from mooring_agent.core.settings import StoreSettings

_MARKS = {"ok": "[green]ok  [/]", "warn": "[yellow]warn[/]", "fail": "[red]FAIL[/]"}
_WIDE = 10_000


@click.command()
@store_options
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(store_settings: StoreSettings, as_json: bool) -> None:
    """Examine a destination, and leave nothing behind there.

    Access, conditional writes, checksums, clock, and how fast bytes go up and come back.
    """
    with errors_reported():
        failed = asyncio.run(_examine(store_settings, as_json))
    raise SystemExit(1 if failed else 0)


async def _examine(store_settings: StoreSettings, as_json: bool) -> bool:
    from mooring_agent.doctor import examine

    # In a file or a pipe a path stays in one piece.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDE)
    findings = []
    async for finding in examine(store_settings):
        findings.append(finding)
        if not as_json:
            row = Table.grid(padding=(0, 2, 0, 0))
            row.add_row(_MARKS[finding.verdict], Text(f"{finding.name}: {finding.detail}"))
            if finding.hint:
                row.add_row("", Text(finding.hint, style="dim"))
            console.print(row)
    if as_json:
        fields = ("name", "verdict", "detail", "hint")
        click.echo(json.dumps([{name: getattr(finding, name) for name in fields} for finding in findings]))
    return any(finding.verdict == "fail" for finding in findings)
