"""The agent as a Checkpointer sees it: every method returns, whatever the agent does.

Owns the log lines about an unreachable agent: one warning when it stops answering, one line when it answers again. Must
not know where checkpoints lie. Without a socket there is no agent, and gRPC is never imported.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from keepstep.agent_client.restores import Restores
from keepstep.autoload import own_copies
from keepstep.autoload.post_import import reason
from keepstep.checkpoints.records import Kind
from keepstep.errors import AgentError, ErrorKind
from keepstep.operating_system import HAS_AGENTS, warn_unprotected
from keepstep.ranks.rank_store import Ranks
from keepstep_api import __version__, names

if TYPE_CHECKING:
    from keepstep.agent_client.channel import Channel
    from keepstep_api.v1.agent_pb2 import BeginSaveResponse, RegisterResponse

_Answer = TypeVar("_Answer")

_log: Final = logging.getLogger("keepstep")
RETRY_SECONDS: Final = 30.0
"""How long `is_back` waits after a failed call before it tries the agent again."""


class Agent:
    """Client for the local agent; a no-op when there is none."""

    def __init__(self, socket: Path | None, *, ranks: Ranks, holds_liveness_lock: bool) -> None:
        self._holds_liveness_lock = holds_liveness_lock
        self._client = f"keepstep-python/{__version__}"
        self._channel: Channel | None = None
        self._registered = False
        self.unreachable = False
        """Whether the agent did not answer the last call, or refused it for now."""
        self._said_version = False
        self._look_at = 0.0
        self._objective = (0.0, 0.0)
        self._keeps_objective = False
        self._unprotected_directory = ""
        self.newest_committed: tuple[int, str] | None = None
        """Step of the newest committed checkpoint, as the agent said when this process last registered."""
        self.terminating = False
        """Whether the agent knew of a termination notice when this process registered."""
        if not HAS_AGENTS:
            warn_unprotected()
            return
        if socket is None:
            _log.warning("no agent: checkpoints stay on the local disk; see `keepstep run`")
            return
        self._channel = _open_channel(socket, ranks)
        self._register()

    def keeps(self, recovery_point_seconds: float, max_overhead: float) -> bool:
        """Have the agent ask for saves so that the recovery point gets no older; return whether it does.

        `max_overhead`: the largest share of the training's time for that, from 0 to 1; 0: as the agent's settings say.
        """
        if self._objective != (recovery_point_seconds, max_overhead):
            self._objective = (recovery_point_seconds, max_overhead)
            self._registered = False
            self._register()
        return self._keeps_objective and not self.unreachable

    def tell_unprotected(self, directory: Path) -> None:
        """Have the agent tell people that checkpoints in this directory are out of its sight."""
        self._unprotected_directory = str(directory).encode(errors="replace").decode()
        self._registered = False
        self._register()

    def is_back(self) -> bool:
        """Return whether an agent that was unreachable answers again.

        Calls the agent only RETRY_SECONDS after the last failed call, and waits at most a second.
        """
        if not self.unreachable or time.monotonic() < self._look_at:
            return False
        self._register()
        return not self.unreachable

    def begin_save(self, *, step: int, kind: Kind, save: str) -> "BeginSaveResponse | None":
        """Ask the agent for room for a save. Returns None when there is no agent or the call fails."""

        def begin(channel: "Channel") -> "BeginSaveResponse":
            self._ensure_registered(channel)
            return channel.begin_save(step=step, kind=kind, save=save)

        return self._call(begin)

    def announce(
        self,
        *,
        path: Path,
        step: int,
        kind: Kind,
        save: str,
        ranks: Ranks,
        stall_seconds: float,
        units: Mapping[str, float],
        urgent: bool,
        files: Sequence[str] = (),
        others: Sequence[str] = (),
        output: str = "",
    ) -> bool | None:
        """Announce a checkpoint; return whether the agent has taken it over, or None if there is none that answers.

        `files`: those of the save, relative to `path`, the same on all ranks of the pod; empty: everything in it.
        `others`: files of the program's own in it, which it may write to again; only with `files`, and at most
        `names.MOST_OTHERS`. `stall_seconds`: how long training stood still for it; 0: not known. `units`: what the
        program counts, done until then. `output`: as in a record. `urgent`: also call an agent that has just timed out.
        """

        def announce(channel: "Channel") -> bool:
            try:
                channel.announce(
                    path=path,
                    step=step,
                    kind=kind,
                    save=save,
                    ranks=ranks,
                    stall_seconds=stall_seconds,
                    units=units,
                    urgent=urgent,
                    files=files,
                    others=others,
                    output=output,
                )
            except AgentError as error:
                if error.kind is not ErrorKind.AGENT_REFUSED:
                    raise
                self._failed(error)
                return False
            return True

        announced = self._call(announce)
        if not announced:
            return announced
        # The agent may have been restarted, and a rank that does not lead its pod calls no `begin_save`.
        self._register()
        return True

    def restores(self) -> Restores | None:
        """Return what asks the agent to bring checkpoints here; None when there is no agent."""
        return None if self._channel is None else Restores(self._channel)

    def abort_save(self, save: str) -> None:
        self._call(lambda channel: channel.abort_save(save))

    def notify_termination(self, source: str) -> bool:
        """Tell the agent that the pod is ending; return whether it answered."""

        def notify(channel: "Channel") -> bool:
            channel.notify_termination(source)
            self._answered()
            return True

        return bool(self._call(notify))

    def seconds_to_write(self, size_bytes: int) -> float | None:
        """Return how long a checkpoint of this size may take to be written until the pod's end comes too early for it.

        That is the time to the end of the grace period, less that of the upload at the agent's measured rate. None
        when there is no agent or no such end.
        """
        status = self._call(lambda channel: channel.status())
        if status is None or not status.deadline:
            return None
        rate = status.upload_rate_bytes_per_second
        return float(status.deadline - time.time() - (size_bytes / rate if rate else 0.0))

    def newest_stored_save(self) -> str:
        """Return the id of the newest committed save; empty if there is none, or no agent that answers."""
        status = self._call(lambda channel: channel.status())
        return "" if status is None else str(status.newest_committed.save)

    def _call(self, call: Callable[["Channel"], _Answer]) -> _Answer | None:
        """Return what `call` returns; None when there is no agent or it does not answer."""
        try:
            return None if self._channel is None else call(self._channel)
        except AgentError as error:
            self._failed(error)
            return None

    def _register(self) -> None:
        self._call(self._ensure_registered)

    def _ensure_registered(self, channel: "Channel") -> None:
        if not self._registered:
            recovery_point_seconds, max_overhead = self._objective
            welcome = channel.register(
                holds_liveness_lock=self._holds_liveness_lock,
                client=self._client,
                recovery_point_seconds=recovery_point_seconds,
                max_overhead=max_overhead,
                unprotected_directory=self._unprotected_directory,
            )
            # An older agent does not know of it.
            self._keeps_objective = bool(welcome.recovery_point_seconds)
            self.terminating |= welcome.terminating
            newest = welcome.newest_committed
            has_any = welcome.HasField("newest_committed")
            self.newest_committed = (newest.step, newest.output_key) if has_any else None
            self._registered = True
            self._compare_versions(welcome)
        self._answered()

    def _compare_versions(self, welcome: "RegisterResponse") -> None:
        if welcome.api_version != names.API_VERSION and not self._said_version:
            self._said_version = True
            older = "agent" if welcome.api_version < names.API_VERSION else "client"
            _log.warning(
                "the %s is older: client=%s api=%d agent=%s api=%d hint=what both support works; update the older one, "
                "see docs/compatibility.md",
                older,
                self._client,
                names.API_VERSION,
                welcome.agent_version,
                welcome.api_version,
            )

    def _failed(self, error: AgentError) -> None:
        if error.kind is ErrorKind.AGENT_REFUSED:
            _log.warning("the agent refused: error=%s", error)
            return
        # The agent that answers next may be another one.
        self._registered = False
        self._look_at = time.monotonic() + RETRY_SECONDS
        if not self.unreachable:
            self.unreachable = True
            _log.warning(
                "%s, checkpoints are announced again when it answers: error=%s hint=%s",
                "the agent refuses calls for now" if error.kind is ErrorKind.AGENT_BUSY else "agent unreachable",
                error,
                error.hint,
            )

    def _answered(self) -> None:
        if self.unreachable:
            self.unreachable = False
            _log.info("agent reachable again")


def _open_channel(socket: Path, ranks: Ranks) -> "Channel | None":
    """Return None where gRPC or protobuf is missing, broken, or older than the generated code needs."""
    try:
        # A broken installation must show here and not in a training step.
        with own_copies.importable():
            from keepstep.agent_client import channel
    except Exception as error:
        _log.warning(
            "no agent: gRPC cannot be loaded, an agent beside this program looks for its checkpoints every 30 seconds: "
            "error=%s hint=pip install --upgrade 'grpcio>=1.48.2' 'protobuf>=3.20.3'",
            reason(error),
        )
        return None
    return channel.Channel(socket, ranks)
