"""Serves the gRPC API on the volume's unix socket: calls become events, and the state becomes answers. Decides nothing.

A call that changes something is answered only after its event is journaled and applied. `errors.py` maps errors and
refuses requests beyond the limits; `call_limits.py` refuses calls beyond theirs. Invariant: an agent that ends leaves
no socket behind, and one that starts replaces the socket of a killed agent.
"""

import asyncio
import os
import secrets
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from keepstep_agent import __version__
from keepstep_agent.catalog.reading import StoredFiles
from keepstep_agent.core.agent import disk_pressure, drain
from keepstep_agent.core.agent.checkpoint import Checkpoint
from keepstep_agent.core.agent.events import ObjectiveGiven, RankRegistered, SaveAborted, SaveBegun, SaveRequested
from keepstep_agent.core.errors import ErrorKind, KeepstepError, RequestError, printable
from keepstep_agent.core.settings.checks import LEAST_RECOVERY_POINT_SECONDS
from keepstep_agent.core.stored.object_layout import check_token
from keepstep_agent.ports import Clock
from keepstep_agent.restore.partial_copy import FileRange
from keepstep_agent.runtime.api.call_limits import SERVER_OPTIONS, CallsLimited
from keepstep_agent.runtime.api.errors import ErrorsAnswered
from keepstep_agent.runtime.engine import status
from keepstep_agent.runtime.engine.engine import Engine
from keepstep_agent.runtime.engine.telemetry import RefusalLog
from keepstep_agent.runtime.monitors.monitors import Monitors
from keepstep_agent.runtime.monitors.ranks import LiveRanks
from keepstep_agent.runtime.work.announcements import Announcement, Announcements
from keepstep_agent.runtime.work.fetches import Fetches
from keepstep_api.names import API_VERSION, socket_address
from keepstep_api.v1 import agent_pb2, agent_pb2_grpc

_DEFAULT_STATUS_INTERVAL_MS = 500
log = structlog.get_logger("keepstep.api")


class AgentService(agent_pb2_grpc.AgentServicer):
    """The servicer of `keepstep.v1.Agent`."""

    def __init__(
        self,
        *,
        engine: Engine,
        clock: Clock,
        announcements: Announcements,
        fetches: Fetches,
        live_ranks: LiveRanks,
        monitors: Monitors,
        tell_unprotected: Callable[[str], None] | None = None,
    ) -> None:
        """`tell_unprotected` is called with a directory whose checkpoints are out of the agent's sight."""
        self._engine = engine
        self._tell_unprotected = tell_unprotected
        self._clock = clock
        self._announcements = announcements
        self._fetches = fetches
        self._live_ranks = live_ranks
        self._monitors = monitors
        self._refusals = RefusalLog()
        self._said_version = False

    async def Register(self, request: agent_pb2.RegisterRequest, context: Any) -> agent_pb2.RegisterResponse:
        await self._register(request)
        if 0 < request.recovery_point_seconds < LEAST_RECOVERY_POINT_SECONDS:
            raise RequestError(
                ErrorKind.BAD_REQUEST,
                f"recovery_point_seconds is {request.recovery_point_seconds:g}",
                hint=f"give {LEAST_RECOVERY_POINT_SECONDS:g} or more, or 0 for none",
            )
        if request.recovery_point_seconds:
            await self._engine.submit(
                ObjectiveGiven(
                    at=self._clock.now(),
                    recovery_point_seconds=request.recovery_point_seconds,
                    max_overhead=request.max_overhead,
                )
            )
        if request.api_version not in (0, API_VERSION) and not self._said_version:
            self._said_version = True
            log.warning(
                "client.other_version",
                client=printable(request.client),
                client_api=request.api_version,
                agent_api=API_VERSION,
                hint="what both support works; update the older one, see docs/compatibility.md",
            )
        if request.unprotected_directory and self._tell_unprotected is not None:
            self._tell_unprotected(printable(request.unprotected_directory))
        await self._monitors.look_at_ranks()
        state = self._engine.state
        newest, objective = state.newest_committed, state.save_requests.objective(state.settings.objective)
        return agent_pb2.RegisterResponse(
            agent_version=__version__,
            volume=state.settings.volume,
            newest_committed=status.describe_checkpoint(newest) if newest else None,
            terminating=state.termination.noticed,
            api_version=API_VERSION,
            recovery_point_seconds=objective.recovery_point_seconds if objective else 0.0,
        )

    async def BeginSave(self, request: agent_pb2.BeginSaveRequest, context: Any) -> agent_pb2.BeginSaveResponse:
        kind = status.kind_from_wire(request.kind)
        attempt = check_token(request.attempt, "attempt") if request.attempt else secrets.token_hex(4)
        save = check_token(request.save, "save id") if request.save else f"{attempt}-{secrets.token_hex(4)}"
        state = self._engine.state
        if save in state.begun:
            # The answer was lost and the client asks again: a save must not be refused for the room kept for itself.
            return agent_pb2.BeginSaveResponse(
                admitted=True, save=save, budget_bytes=disk_pressure.budget_bytes(state) or 0
            )
        verdict = await self._monitors.admit(kind, request.size_bytes)
        budget_bytes = disk_pressure.budget_bytes(state) or 0
        if not verdict.admitted:
            self._refusals.refused(request.attempt, request.step, kind, verdict.reason)
            return agent_pb2.BeginSaveResponse(admitted=False, reason=verdict.reason, budget_bytes=budget_bytes)
        size_bytes = request.size_bytes or disk_pressure.forecast_bytes(state)
        begun = SaveBegun(at=self._clock.now(), save=save, attempt=attempt, step=request.step, size_bytes=size_bytes)
        try:
            await self._engine.submit(begun)
        except asyncio.CancelledError:
            # The caller has stopped waiting, so it will never say what became of this save.
            self._engine.post(SaveAborted(at=self._clock.now(), save=save))
            raise
        return agent_pb2.BeginSaveResponse(admitted=True, save=save, budget_bytes=budget_bytes)

    async def AnnounceCheckpoint(
        self, request: agent_pb2.AnnounceCheckpointRequest, context: Any
    ) -> agent_pb2.AnnounceCheckpointResponse:
        checkpoint = await self._announcements.announce(
            Announcement(
                path=request.path,
                step=request.step,
                name=request.name,
                kind=status.kind_from_wire(request.kind),
                save=request.save,
                attempt=request.attempt,
                rank=request.rank,
                world_size=max(1, request.world_size),
                local_world_size=max(1, request.local_world_size),
                files=tuple(request.files),
                others=tuple(request.others),
                output=request.output,
                stall_seconds=request.stall_seconds,
                units=tuple((check_token(one.name, "unit"), one.done) for one in request.units),
            )
        )
        return agent_pb2.AnnounceCheckpointResponse(
            save=checkpoint.info.save,
            phase=status.phase_to_wire(checkpoint.phase),
            size_bytes=checkpoint.size_bytes,
            file_count=checkpoint.file_count,
        )

    async def AbortSave(self, request: agent_pb2.AbortSaveRequest, context: Any) -> agent_pb2.AbortSaveResponse:
        await self._engine.submit(SaveAborted(at=self._clock.now(), save=request.save))
        return agent_pb2.AbortSaveResponse()

    async def RequestSave(self, request: agent_pb2.RequestSaveRequest, context: Any) -> agent_pb2.RequestSaveResponse:
        await self._monitors.look_at_ranks()
        await self._engine.submit(SaveRequested(at=self._clock.now()))
        return agent_pb2.RequestSaveResponse(ranks=len(self._engine.state.alive_ranks))

    async def NotifyTermination(
        self, request: agent_pb2.NotifyTerminationRequest, context: Any
    ) -> agent_pb2.NotifyTerminationResponse:
        if request.trainers_gone:
            await self._monitors.drain_after_program(
                failed_at=request.trainers_failed_at or None,
                failed_early=request.trainers_failed_early,
                survivors_ended_well=request.survivors_ended_well,
            )
        else:
            await self._monitors.notice_termination(request.source or "api", request.grace_seconds)
        return agent_pb2.NotifyTerminationResponse(deadline=drain.deadline(self._engine.state) or 0.0)

    async def GetStatus(self, request: agent_pb2.GetStatusRequest, context: Any) -> agent_pb2.Status:
        return self._status()

    async def WatchStatus(self, request: agent_pb2.WatchStatusRequest, context: Any) -> AsyncIterator[agent_pb2.Status]:
        interval_seconds = (request.interval_ms or _DEFAULT_STATUS_INTERVAL_MS) / 1000
        while True:
            seen = self._engine.revision
            yield self._status()
            await asyncio.sleep(interval_seconds)
            if self._fetches.progress() is None:
                await self._engine.next_change(seen)

    async def WaitCommitted(
        self, request: agent_pb2.WaitCommittedRequest, context: Any
    ) -> agent_pb2.WaitCommittedResponse:
        checkpoint = self._find(request.save)
        await self._engine.until(lambda state: checkpoint.ended)
        if not checkpoint.durable:
            raise RequestError(
                ErrorKind.CHECKPOINT_FAILED,
                f"{checkpoint.info.name} is {checkpoint.phase}: {checkpoint.reason}",
                hint=checkpoint.hint or "a newer checkpoint replaces it",
            )
        return agent_pb2.WaitCommittedResponse(checkpoint=status.describe_checkpoint(checkpoint))

    async def ListCheckpoints(
        self, request: agent_pb2.ListCheckpointsRequest, context: Any
    ) -> agent_pb2.ListCheckpointsResponse:
        return agent_pb2.ListCheckpointsResponse(checkpoints=status.describe_all(self._engine.state))

    async def ListRestorable(
        self, request: agent_pb2.ListRestorableRequest, context: Any
    ) -> agent_pb2.ListRestorableResponse:
        output_key = request.output_key if request.HasField("output_key") else None
        found = await self._fetches.restorable(output_key, request.wait_ms / 1000, name=request.name)
        return agent_pb2.ListRestorableResponse(
            ready=found.committed is not None,
            checkpoints=[
                agent_pb2.RestorableCheckpoint(step=one.step, save=one.save, output_key=one.output_key)
                for one in found.committed or ()
            ],
            storage_error=found.storage_error,
        )

    async def Fetch(self, request: agent_pb2.FetchRequest, context: Any) -> agent_pb2.FetchResponse:
        if request.whole and request.ranges:
            raise RequestError(
                ErrorKind.BAD_REQUEST, "ask for the whole checkpoint or for ranges", hint="set one of whole and ranges"
            )
        progress = await self._fetches.fetch(
            check_token(request.save, "save id"),
            [
                FileRange(path=one.path, offset_bytes=one.offset_bytes, length_bytes=one.length_bytes)
                for one in request.ranges
            ],
            whole=request.whole,
            wait_seconds=request.wait_ms / 1000,
        )
        return agent_pb2.FetchResponse(
            done=progress.path is not None,
            path=str(progress.path or ""),
            done_bytes=progress.done_bytes,
            total_bytes=progress.total_bytes,
            storage_error=progress.storage_error,
            files=() if progress.files is None else _listed(progress.files),
        )

    async def Attach(self, request: agent_pb2.AttachRequest, context: Any) -> AsyncIterator[agent_pb2.SaveRequest]:
        await self._register(request)
        with self._live_ranks.attached(request.local_rank) as requests:
            await self._monitors.look_at_ranks()
            try:
                while True:
                    yield await requests.get()
            finally:
                self._monitors.look_soon()

    async def _register(self, request: agent_pb2.RegisterRequest | agent_pb2.AttachRequest) -> None:
        """Record which rank a local rank is."""
        world_size = max(1, request.world_size)
        if request.rank >= world_size:
            raise RequestError(
                ErrorKind.BAD_REQUEST,
                f"rank {request.rank} does not exist in a world of {world_size}",
                hint="ranks count from 0 to world_size - 1",
            )
        registered = RankRegistered(at=self._clock.now(), local_rank=request.local_rank, rank=request.rank)
        await self._engine.submit(registered, lambda state: state.ranks.get(registered.local_rank) != registered.rank)

    def _status(self) -> agent_pb2.Status:
        described = status.describe(self._engine.state, self._clock.now())
        progress = self._fetches.progress()
        if progress is not None:
            described.fetching.CopyFrom(
                agent_pb2.Fetching(
                    save=progress.save,
                    step=progress.step,
                    done_bytes=progress.done_bytes,
                    total_bytes=progress.total_bytes,
                    storage_error=progress.storage_error,
                )
            )
        return described

    def _find(self, save: str) -> Checkpoint:
        state = self._engine.state
        checkpoint = state.checkpoints.get(save) if save else state.newest()
        if checkpoint is None:
            raise RequestError(
                ErrorKind.UNKNOWN_SAVE,
                f"this agent does not know save {save!r}" if save else "no checkpoint has been announced yet",
                hint="ListCheckpoints returns the saves that it knows; `keepstep ls` lists those in the bucket",
            )
        return checkpoint


def _listed(files: StoredFiles) -> list[str]:
    """Return the paths of all files; none if they are too long for an answer."""
    listed: list[str] = []
    left_bytes = _LISTED_BYTES
    for path in files.paths():
        left_bytes -= len(path.encode())
        if left_bytes < 0:
            return []
        listed.append(path)
    return listed


_LISTED_BYTES: Final = 2 * 1024**2
"""How long the paths of the files that an answer lists are at most: a client takes 4 MiB."""
_OTHERS_THAN_THE_GROUP: Final = 0o117
_OTHERS_THAN_THE_OWNER: Final = 0o177
"""Umasks for the socket. The kernel lets a process connect that may write to it."""
_STOP_SERVING_SECONDS: Final = 0.2


@asynccontextmanager
async def serve_grpc(service: AgentService, socket: Path, *, alone: bool = False) -> AsyncIterator[None]:
    """Serve the API, with standard health and reflection, on a unix socket.

    Its owner may use it, and unless `alone` its group: in a pod, trainer and agent may be different users.
    """
    server = grpc.aio.server(
        interceptors=[CallsLimited(), ErrorsAnswered()], options=[("grpc.so_reuseport", 0), *SERVER_OPTIONS]
    )
    agent_pb2_grpc.add_AgentServicer_to_server(service, server)  # type: ignore[no-untyped-call]  # generated code
    health_service = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    name = agent_pb2.DESCRIPTOR.services_by_name["Agent"].full_name
    reflection.enable_server_reflection([name, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    try:
        socket.parent.mkdir(parents=True, exist_ok=True)
        _remove_left_behind(socket)
        # From its first moment: who has connected stays connected. No other thread makes files by now.
        umask = os.umask(_OTHERS_THAN_THE_OWNER if alone else _OTHERS_THAN_THE_GROUP)
        try:
            server.add_insecure_port(socket_address(socket))
        finally:
            os.umask(umask)
        await server.start()
    except (OSError, RuntimeError) as error:
        raise KeepstepError(
            ErrorKind.BAD_CONFIGURATION,
            f"cannot serve on the socket {socket}: {error}",
            hint="another agent may be running on this volume; or set --socket to a path in a writable directory",
        ) from error
    for service_name in ("", name):
        await health_service.set(service_name, health_pb2.HealthCheckResponse.SERVING)
    try:
        yield
    finally:
        await server.stop(_STOP_SERVING_SECONDS)
        _remove_left_behind(socket)


def _remove_left_behind(socket: Path) -> None:
    """Remove the socket of an agent that has ended. Leaves anything else alone: --socket may name a file by mistake."""
    with suppress(FileNotFoundError):
        if stat.S_ISSOCK(socket.lstat().st_mode):
            socket.unlink()
