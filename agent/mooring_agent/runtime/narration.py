"""The log of a checkpoint's life: one line per event that a person would ask about, with its step, save and cost."""

import structlog

from mooring_agent.core.events import Announced, Committed, DurableEvent, Failed, ObjectsLost, Shed, Staged
from mooring_agent.core.state import State

log = structlog.get_logger("mooring.checkpoint")


def narrate(state: State, event: DurableEvent) -> None:
    """`state` is the state after the event."""
    match event:
        case Announced():
            info = event.info
            log.info(
                "checkpoint.announced",
                name=info.name,
                step=info.step,
                save=info.save,
                kind=info.kind.value,
                rank=event.rank,
                world_size=info.world_size,
            )
        case Staged():
            size_bytes = sum(file.size_bytes for file in event.files)
            log.info(
                "checkpoint.staged",
                save=event.work.save,
                rank=event.work.rank,
                files=len(event.files),
                size_bytes=size_bytes,
                copied=sum(file.private for file in event.files),
            )
        case Committed():
            checkpoint = state.checkpoints[event.work.save]
            log.info(
                "checkpoint.committed",
                name=checkpoint.info.name,
                step=checkpoint.info.step,
                save=event.work.save,
                size_bytes=checkpoint.size_bytes,
                seconds=round(event.at - checkpoint.announced_at, 3),
            )
        case ObjectsLost():
            log.warning("checkpoint.objects_lost", save=event.work.save, files=len(event.files))
        case Shed():
            log.warning("checkpoint.shed", save=event.save, step=_step(state, event.save), reason=event.reason)
        case Failed():
            log.error(
                "checkpoint.failed",
                save=event.save,
                step=_step(state, event.save),
                kind=event.kind.value,
                reason=event.reason,
                hint=event.hint,
            )
        case _:
            # Parts, uploads and pins: too many to tell, and in the journal anyway.
            return


def _step(state: State, save: str) -> int | None:
    checkpoint = state.checkpoints.get(save)
    return checkpoint.info.step if checkpoint else None
