"""Takes an announcement from the request to its staged files: fills in what is left out, and waits for the pins."""

import asyncio
import secrets
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from keepstep_agent.adapters.volume.announced_files import check_path, directory_of
from keepstep_agent.adapters.volume.content_check import content_signature
from keepstep_agent.core.agent import planner
from keepstep_agent.core.agent.announcements import check_announcement, known_announcement, same_content
from keepstep_agent.core.agent.checkpoint import Checkpoint
from keepstep_agent.core.agent.events import Announced
from keepstep_agent.core.agent.state import State
from keepstep_agent.core.errors import ErrorKind, KeepstepError, RequestError
from keepstep_agent.core.limits import NAME_CHARACTERS
from keepstep_agent.core.model import Kind, Phase, SaveInfo
from keepstep_agent.core.policies.repeated_deaths import MEMORY_HINT, announcement_of
from keepstep_agent.core.stored.object_layout import check_directory
from keepstep_agent.ports import Clock, StagingArea
from keepstep_agent.runtime.engine.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """A rank's part of a checkpoint is complete on disk; its values are within `core.limits`.

    Attributes:
        path: Absolute path of the checkpoint, a file or a directory, in the volume.
        name: By default the last part of `path`.
        save: By default the agent makes one, which begins with `attempt` if there is one.
        files: Paths below `path`. By default everything below it.
        others: Paths below `path` of the program's own files, which it may write to again; only with `files`.
        output: The output directory that it belongs to, relative to the volume. By default that of `path`.
        signature: That of the content which the caller has seen and means. By default that of the files as they are.
        recorded_at: When the client recorded the checkpoint, if it is announced by that record. Unix seconds.
        stall_seconds: How long training stood still for it; 0: not known.
        units: What the program counts, done until then.
    """

    path: str
    step: int
    name: str = ""
    kind: Kind = Kind.PERIODIC
    save: str = ""
    attempt: str = ""
    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    files: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    output: str = ""
    signature: str = ""
    recorded_at: float | None = None
    stall_seconds: float = 0.0
    units: tuple[tuple[str, float], ...] = ()


class Announcements:
    """Serves the gRPC API, the directory watch and the recovery of unannounced checkpoints."""

    def __init__(
        self,
        *,
        engine: Engine,
        clock: Clock,
        volume: Path,
        checkpoint_directory: Path,
        staging: StagingArea,
        workers: Executor,
    ) -> None:
        """`workers`: threads for what may take long."""
        self._engine = engine
        self._staging = staging
        self._workers = workers
        self._clock = clock
        self._volume = volume
        self._checkpoint_directory = checkpoint_directory

    async def announce(self, announcement: Announcement) -> Checkpoint:
        """Announce; return once the files are staged (or wait for other local ranks). Raises why they cannot be."""
        event = await self.enter(announcement)
        await self._engine.until(lambda state: _settled(state, event))
        return _outcome(self._engine.state, event)

    async def enter(self, announcement: Announcement) -> Announced:
        """Announce; return once the announcement is durable, before its files are staged. Raises why it is refused."""
        check_path(announcement.path)
        path = announcement.path.rstrip("/") or "/"
        work = announcement_of(path)
        if not planner.may_begin(self._engine.state, work):
            raise RequestError(
                ErrorKind.BAD_REQUEST,
                f"{path} is {self._engine.state.suspects[work]}",
                hint=f"{MEMORY_HINT}; announce it again when everything else is stored",
            )
        title = announcement.name or PurePosixPath(path).name
        with self._engine.doing(work, title[:NAME_CHARACTERS], doing="look at what was announced"):
            return await self._enter(announcement, path)

    async def _enter(self, announcement: Announcement, path: str) -> Announced:
        files = set(announcement.files)
        signature = announcement.signature or await self._signature(announcement, path)
        directory = await asyncio.get_running_loop().run_in_executor(
            self._workers, directory_of, self._volume, self._checkpoint_directory, path
        )
        event = Announced(
            at=self._clock.now(),
            info=SaveInfo(
                save=announcement.save or self._make_save(announcement, path, signature),
                name=announcement.name or PurePosixPath(path).name,
                step=announcement.step,
                kind=announcement.kind,
                world_size=announcement.world_size,
                directory=directory,
                output=check_directory(announcement.output),
            ),
            rank=announcement.rank,
            path=path,
            files=announcement.files,
            others=tuple(file for file in dict.fromkeys(announcement.others) if file not in files),
            local_world_size=announcement.local_world_size,
            signature=signature,
            save_made_here=not announcement.save,
            recorded_at=announcement.recorded_at,
            begun_at=self._engine.state.save_requests.begun_at.get(announcement.save),
            stall_seconds=announcement.stall_seconds,
            units=announcement.units,
        )

        def is_news(state: State) -> bool:
            check_announcement(state, event)
            return known_announcement(state, event) is None

        # The bytes must be on disk first: after a power cut, what the journal calls staged must really be there.
        await asyncio.get_running_loop().run_in_executor(self._workers, self._staging.make_durable, path, event.files)
        await self._engine.submit(event, is_news)
        return event

    async def _signature(self, announcement: Announcement, path: str) -> str:
        """Return the content's signature. If an agent dies, another checkpoint may have the name when this is staged.

        If the content cannot be read: "", or the error if the announcement has no save id.
        """
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._workers, content_signature, self._volume, path, announcement.files)
        except KeepstepError:
            if not announcement.save:
                raise
            return ""  # staging reports what is wrong

    def _make_save(self, announcement: Announcement, path: str, signature: str) -> str:
        if announcement.world_size > 1:
            raise RequestError(
                ErrorKind.BAD_REQUEST,
                "several ranks write this checkpoint and the announcement has no save id",
                hint="pass a `save` that is unique to this save and the same on all its ranks",
            )
        known = same_content(self._engine.state, path=path, rank=announcement.rank, signature=signature)
        return known.info.save if known else f"{announcement.attempt or secrets.token_hex(4)}-{secrets.token_hex(4)}"


def _settled(state: State, event: Announced) -> bool:
    checkpoint = state.checkpoints.get(event.info.save)
    if checkpoint is None or checkpoint.ended:
        return True
    contribution = checkpoint.contributions.get(event.rank)
    if contribution is None:
        # The save failed, and another rank announced it again: what this call waits for will not come.
        return True
    return contribution.staged or not checkpoint.all_announced


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
        raise KeepstepError(checkpoint.error_kind or ErrorKind.VOLUME_UNUSABLE, checkpoint.reason, hint=checkpoint.hint)
    return checkpoint
