"""The commands that Kubernetes runs in the sidecar: ready, its startup probe, and terminating, its preStop hook.

Each is a process of its own, which may have only a fraction of a core, and two seconds in an eviction. So this module
imports nothing slow, and gRPC only for the call.
"""

import socket as socketlib
from typing import Final

import click

from keepstep_agent.cli.agent_options import agent_options
from keepstep_agent.cli.formatting import errors_reported
from keepstep_agent.core.errors import ErrorKind, KeepstepError

_CONNECT_SECONDS: Final = 10.0


@click.command()
@agent_options
@click.option("--grace-seconds", type=float, default=0.0, help="Seconds until SIGKILL; 0: as configured.")
@click.option("--source", default="preStop", help="Who sends the notice; appears in the log.")
def terminating(socket: str, grace_seconds: float, source: str) -> None:
    """Tell the agent that the pod is ending: a preStop hook.

    Returns at once; the agent drains by itself.
    """
    from keepstep_agent.cli.agent_call import CALL_TIMEOUT_SECONDS, agent_stub
    from keepstep_api.v1 import agent_pb2

    with errors_reported(), agent_stub(socket) as stub:
        stub.NotifyTermination(
            agent_pb2.NotifyTerminationRequest(grace_seconds=grace_seconds, source=source),
            timeout=CALL_TIMEOUT_SECONDS,
        )


@click.command()
@agent_options
def ready(socket: str) -> None:
    """Exit with 0 if an agent answers: a startup probe.

    Prints nothing in that case. It does not check the destination.
    """
    with errors_reported():
        try:
            with socketlib.socket(socketlib.AF_UNIX) as connection:
                connection.settimeout(_CONNECT_SECONDS)
                connection.connect(socket)
        except OSError as error:
            raise KeepstepError(
                ErrorKind.UNREACHABLE,
                f"no agent answers on {socket}: {error.strerror or error}",
                hint="it may still be starting; name another agent with --volume or --socket",
            ) from error
