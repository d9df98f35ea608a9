"""`keepstep console`: pages of all runs below a destination. Owns its arguments, and refuses to be open to all."""

import ipaddress
import re
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path

import click

from keepstep_agent.cli.formatting import errors_reported
from keepstep_agent.cli.quantities import duration, host_and_port
from keepstep_agent.cli.store_options import destination_options
from keepstep_agent.core.errors import ErrorKind, KeepstepError
from keepstep_agent.core.settings.values import Settings


def _networks(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> tuple[IPv4Network | IPv6Network, ...]:
    try:
        return tuple(ipaddress.ip_network(value) for value in values)
    except ValueError as error:
        raise click.BadParameter(f"{error}; write 10.0.0.7 or 10.0.0.0/8", context, parameter) from error


def _header(context: click.Context, parameter: click.Parameter, value: str) -> str:
    if value and not re.fullmatch(r"[A-Za-z0-9-]{1,64}", value):
        raise click.BadParameter(f"{value[:40]!r} is no name of a header", context, parameter)
    return value


def _refresh(context: click.Context, parameter: click.Parameter, value: str) -> float:
    seconds = duration(context, parameter, value)
    if seconds is None or seconds < 1:
        raise click.BadParameter("give at least 1s", context, parameter)
    return seconds


@click.command()
@destination_options("log_format")
@click.option(
    "--address",
    default="127.0.0.1:8400",
    show_default=True,
    callback=host_and_port,
    help="host:port to listen on. Another host than this machine needs a token or a proxy.",
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File with the token that lets people in: they give it once in a form. A new token counts within seconds.",
)
@click.option(
    "--user-header",
    default="",
    callback=_header,
    help="Header in which an authenticating proxy names the user.",
)
@click.option(
    "--trusted-proxy",
    "trusted_proxies",
    metavar="ADDRESS",
    multiple=True,
    callback=_networks,
    help="Address or network of the proxies whose header counts. Repeatable.  [default: this machine]",
)
@click.option(
    "--refresh-every",
    metavar="DURATION",
    default="30s",
    show_default=True,
    callback=_refresh,
    help="How often the runs are read, and pages brought up to date.",
)
@click.option(
    "--abandoned-after",
    metavar="DURATION",
    callback=duration,
    default="7d",
    show_default=True,
    help="A run that has committed nothing for so long, and has no final checkpoint, is abandoned.",
)
def console(
    settings: Settings,
    address: tuple[str, int],
    token_file: Path | None,
    user_header: str,
    trusted_proxies: tuple[IPv4Network | IPv6Network, ...],
    refresh_every: float,
    abandoned_after: float,
) -> None:
    """Serve pages of all runs at DEST and of each of them.

    DEST is a prefix that all runs have in common, or one run. The pages show recovery points, states, goodput, what
    was lost and why, and checkpoints. Reads markers and ledgers; writes nothing, so read-only credentials will do.
    docs/console.md says more.
    """
    with errors_reported():
        # Imported here, so that the other commands do not wait for a web server to load.
        import uvloop

        from keepstep_agent.console.access import is_loopback, read_token
        from keepstep_agent.console.server import serve_console
        from keepstep_agent.console.settings import ConsoleSettings
        from keepstep_agent.runtime.engine.logs import configure_logs

        token = "" if token_file is None else read_token(token_file)
        here = is_loopback(address[0])
        if not here and not token and not user_header:
            raise _open_to_all(
                f"--address {address[0]}:{address[1]} would show all runs to whoever reaches this machine",
                "give --token-file, or --user-header and --trusted-proxy; or listen on 127.0.0.1",
            )
        if user_header and not trusted_proxies:
            if not here:
                raise _open_to_all(
                    f"whoever reaches {address[0]}:{address[1]} could send the header {user_header}",
                    "give the addresses of the proxies that send it, with --trusted-proxy",
                )
            trusted_proxies = _networks_of_this_machine()
        configure_logs(settings.log_format)
        given = ConsoleSettings(
            destination=settings.store.destination,
            address=address,
            token=token,
            # What is no file, such as a pipe, can be read once.
            token_file=token_file if token_file and token_file.is_file() else None,
            user_header=user_header,
            trusted_proxies=trusted_proxies,
            refresh_seconds=refresh_every,
            abandoned_after_seconds=abandoned_after,
        )
        uvloop.run(serve_console(given, settings.store, _tell))


def _tell(address: tuple[str, int]) -> None:
    host, port = address
    click.echo(f"http://{f'[{host}]' if ':' in host else host}:{port}/")


def _networks_of_this_machine() -> tuple[IPv4Network | IPv6Network, ...]:
    return IPv4Network("127.0.0.0/8"), IPv6Network("::1/128")


def _open_to_all(message: str, hint: str) -> KeepstepError:
    return KeepstepError(ErrorKind.BAD_CONFIGURATION, message, hint=hint)
