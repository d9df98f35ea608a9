"""Whether an announcement may enter at all: checked before it is journaled, so a refusal changes nothing."""

from mooring_agent.core.errors import ErrorKind, RequestError
from mooring_agent.core.events import Announced
from mooring_agent.core.limits import LOCAL_RANKS
from mooring_agent.core.model import Phase
from mooring_agent.core.object_layout import check_file_path, check_token
from mooring_agent.core.state import Checkpoint, State


def known(state: State, event: Announced) -> Checkpoint | None:
    """The checkpoint that this very announcement already made; None if it is news."""
    checkpoint = state.checkpoints.get(event.info.save)
    if checkpoint is None or checkpoint.phase is Phase.FAILED:
        return None
    if checkpoint.phase is Phase.SHED:
        # Its other ranks may announce after a newer checkpoint made it not worth having.
        return checkpoint
    share = checkpoint.shares.get(event.rank)
    return checkpoint if share is not None and share.source == event.source else None


def same_content(state: State, *, source: str, rank: int, signature: str) -> Checkpoint | None:
    """The checkpoint with this content of this path, for clients that give no save id."""
    for checkpoint in reversed(state.checkpoints.values()):
        share = checkpoint.shares.get(rank)
        if share and checkpoint.phase is not Phase.FAILED and (share.source, share.signature) == (source, signature):
            return checkpoint
    return None


def check(state: State, event: Announced) -> None:
    """Raises RequestError when the announcement makes no sense or contradicts an earlier one."""
    if state.termination.exiting:
        raise RequestError(
            ErrorKind.SHUTTING_DOWN,
            "the agent is exiting",
            hint="the checkpoint stays on the volume for the next start",
        )
    info = event.info
    check_token(info.name, "checkpoint name")
    check_token(info.save, "save id")
    for file in event.files:
        check_file_path(file)
    if not 0 <= event.rank < info.world_size:
        raise RequestError(
            ErrorKind.BAD_REQUEST,
            f"rank {event.rank} does not exist in a world of {info.world_size}",
            hint="ranks count from 0 to world_size - 1",
        )
    if event.local_world_size > info.world_size:
        raise RequestError(
            ErrorKind.BAD_REQUEST,
            f"local_world_size {event.local_world_size} is more than world_size {info.world_size}",
            hint="local_world_size counts the ranks that announce to this agent",
        )
    checkpoint = state.checkpoints.get(info.save)
    if checkpoint is None:
        return
    if len(checkpoint.shares) >= LOCAL_RANKS and event.rank not in checkpoint.shares:
        raise RequestError(
            ErrorKind.BAD_REQUEST,
            f"save {info.save} has {LOCAL_RANKS} ranks here already",
            hint="more ranks than that cannot share one agent: announce the directory once for all of them",
        )
    if checkpoint.phase is Phase.FAILED:
        if any(share.staged for share in checkpoint.shares.values()):
            raise RequestError(
                ErrorKind.CONTRADICTION,
                f"save {info.save} has failed after some of it may have been sent: {checkpoint.reason}",
                hint="a key is never reused for other bytes: take a new save id",
            )
        return
    if checkpoint.info != info:
        raise RequestError(
            ErrorKind.CONTRADICTION,
            f"save {info.save} is known as {_describe(checkpoint.info)}, not as {_describe(info)}",
            hint="all ranks of one save must give the same name, step, kind and world size",
        )
    share = checkpoint.shares.get(event.rank)
    other = next((one for one in checkpoint.shares.values() if not (one.requested_files or event.files)), None)
    if other is not None and other.local_world_size != max(1, event.local_world_size):
        raise RequestError(
            ErrorKind.CONTRADICTION,
            f"rank {event.rank} announces save {info.save} as one of {event.local_world_size} ranks here, "
            f"and rank {other.rank} as one of {other.local_world_size}",
            hint="local_world_size counts the ranks that announce this save to this agent without listing files",
        )
    if share is None and other is not None and _sharing_count(checkpoint) >= other.local_world_size > 1:
        raise RequestError(
            ErrorKind.CONTRADICTION,
            f"save {info.save} has all its {other.local_world_size} ranks here, without rank {event.rank}",
            hint="local_world_size counts the ranks that announce this save to this agent without listing files",
        )
    if share is not None and share.source != event.source:
        raise RequestError(
            ErrorKind.CONTRADICTION,
            f"rank {event.rank} of save {info.save} was announced from {share.source} before",
            hint="a save id belongs to one save: take a new one for the next",
        )
    if share is None and checkpoint.durable:
        raise RequestError(
            ErrorKind.CONTRADICTION,
            f"save {info.save} is {checkpoint.phase} already, without rank {event.rank}",
            hint="announce every rank of a save with the same world_size and a local_world_size that counts them",
        )


def _sharing_count(checkpoint: Checkpoint) -> int:
    return sum(not share.requested_files for share in checkpoint.shares.values())


def _describe(info: object) -> str:
    return str(info).removeprefix("SaveInfo")
