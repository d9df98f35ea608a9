"""Takes an announcement from the request to its staged files: fills in what is left out, and waits for the pins."""

import asyncio
import secrets
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path, PurePosixPath

from mooring_agent.adapters.volume.content_check import content_signature
from mooring_agent.adapters.volume.source_walk import check_source
from mooring_agent.core.agent.announcements import check_announcement, known_announcement, same_content
from mooring_agent.core.agent.checkpoint import Checkpoint
from mooring_agent.core.agent.events import Announced
from mooring_agent.core.agent.state import State
from mooring_agent.core.errors import ErrorKind, MooringError, RequestError
from mooring_agent.core.model import Phase, SaveInfo
from mooring_agent.ports import Clock, StagingArea
from mooring_agent.runtime.api.errors import check_request
from mooring_agent.runtime.engine import status
from mooring_agent.runtime.engine.engine import Engine
from mooring_api.v1 import agent_pb2


class Announcements:
    """Serves the gRPC API, the directory watch and the recovery of unannounced checkpoints."""

    def __init__(
        self,
        *,
        engine: Engine,
        clock: Clock,
        volume: Path,
        staging: StagingArea,
        workers: Executor,
    ) -> None:
        """`workers`: threads for what may take long."""
        self._engine = engine
        self._staging = staging
        self._workers = workers
        self._clock = clock
        self._volume = volume

    async def announce(self, request: agent_pb2.AnnounceCheckpointRequest) -> Checkpoint:
        """Announce; return once the files are staged (or wait for other local ranks). Raises why they cannot be."""
        event = await self.enter(request)
        await self._engine.until(lambda state: _settled(state, event))
        return _outcome(self._engine.state, event)

    async def enter(
        self, request: agent_pb2.AnnounceCheckpointRequest, *, signature: str = "", recorded_at: float | None = None
    ) -> Announced:
        """Announce; return once the announcement is durable, before its files are staged. Raises why it is refused.

        `signature`: that of the content which the caller has seen and means; by default that of the files as they are.
        `recorded_at`: when the client recorded the checkpoint, if it is announced by that record.
        """
        # Some callers are in this process, so the server has not checked their requests.
        check_request(request)
        source = _absolute(request.path)
        world_size = max(1, request.world_size)
        if not signature:
            signature = await self._signature(source, request.files, must_be_there=not request.save)
        event = Announced(
            at=self._clock.now(),
            info=SaveInfo(
                save=request.save or self._make_save(request, source, signature, world_size),
                name=request.name or PurePosixPath(source).name,
                step=request.step,
                kind=status.kind_from_wire(request.kind),
                world_size=world_size,
            ),
            rank=request.rank,
            source=source,
            files=tuple(request.files),
            local_world_size=max(1, request.local_world_size),
            signature=signature,
            save_made_here=not request.save,
            recorded_at=recorded_at,
        )

        def is_news(state: State) -> bool:
            check_announcement(state, event)
            return known_announcement(state, event) is None

        # The bytes must be on disk first: after a power cut, what the journal calls staged must really be there.
        await asyncio.get_running_loop().run_in_executor(self._workers, self._staging.make_durable, source, event.files)
        await self._engine.submit(event, is_news)
        return event

    async def _signature(self, source: str, files: Sequence[str], *, must_be_there: bool) -> str:
        """Return the content's signature. If an agent dies, another checkpoint may have the name when this is staged.

        If the content cannot be read: "", or the error if it `must_be_there`.
        """
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._workers, content_signature, self._volume, source, files)
        except MooringError:
            if must_be_there:
                raise
            return ""  # staging reports what is wrong

    def _make_save(
        self, request: agent_pb2.AnnounceCheckpointRequest, source: str, signature: str, world_size: int
    ) -> str:
        if world_size > 1:
            raise RequestError(
                ErrorKind.BAD_REQUEST,
                "several ranks write this checkpoint and the announcement has no save id",
                hint="pass a `save` that is unique to this save and the same on all its ranks",
            )
        known = same_content(self._engine.state, source=source, rank=request.rank, signature=signature)
        return known.info.save if known else f"{request.attempt or secrets.token_hex(4)}-{secrets.token_hex(4)}"


def _absolute(path: str) -> str:
    check_source(path)
    return path.rstrip("/") or "/"


def _settled(state: State, event: Announced) -> bool:
    checkpoint = state.checkpoints.get(event.info.save)
    if checkpoint is None or checkpoint.ended:
        return True
    contribution = checkpoint.contributions.get(event.rank)
    if contribution is None:
        # The save failed, and another rank announced it again: what this call waits for will not come.
        return True
    return contribution.staged or (
        not contribution.requested_files and len(checkpoint.contributions) < contribution.local_world_size
    )


def _outcome(state: State, event: Announced) -> Checkpoint:
    checkpoint = state.checkpoints.get(event.info.save)
    if checkpoint is None:
        raise RequestError(ErrorKind.UNKNOWN_SAVE, f"save {event.info.save} has ended and is forgotten", hint="")
    if event.rank not in checkpoint.contributions and checkpoint.phase is not Phase.SHED:
        raise RequestError(
            ErrorKind.CHECKPOINT_FAILED,
            f"save {event.info.save} failed to be staged, and was announced again without rank {event.rank}",
            hint="announce this rank again",
        )
    if checkpoint.phase is Phase.FAILED:
        raise MooringError(checkpoint.error_kind or ErrorKind.VOLUME_UNUSABLE, checkpoint.reason, hint=checkpoint.hint)
    return checkpoint
