"""Converts the state into the API's messages."""

from typing import Final

from keepstep_agent import __version__
from keepstep_agent.core.agent import disk_pressure, drain
from keepstep_agent.core.agent.checkpoint import Checkpoint
from keepstep_agent.core.agent.state import State
from keepstep_agent.core.model import Kind, Phase
from keepstep_agent.core.policies.repeated_deaths import MEMORY_HINT
from keepstep_api.v1 import agent_pb2

_KINDS: Final[dict[Kind, agent_pb2.Kind]] = {kind: getattr(agent_pb2, f"KIND_{kind.name}") for kind in Kind}
_PHASES: Final[dict[Phase, agent_pb2.Phase]] = {phase: getattr(agent_pb2, f"PHASE_{phase.name}") for phase in Phase}


def kind_from_wire(kind: agent_pb2.Kind) -> Kind:
    """Unspecified counts as periodic."""
    return next((ours for ours, theirs in _KINDS.items() if theirs == kind), Kind.PERIODIC)


def phase_to_wire(phase: Phase) -> agent_pb2.Phase:
    return _PHASES[phase]


def describe_checkpoint(checkpoint: Checkpoint) -> agent_pb2.Checkpoint:
    return agent_pb2.Checkpoint(
        name=checkpoint.info.name,
        save=checkpoint.info.save,
        step=checkpoint.info.step,
        kind=_KINDS[checkpoint.info.kind],
        phase=_PHASES[checkpoint.phase],
        world_size=checkpoint.info.world_size,
        size_bytes=checkpoint.size_bytes,
        durable_bytes=checkpoint.durable_bytes,
        file_count=checkpoint.file_count,
        announced_at=checkpoint.announced_at,
        committed_at=checkpoint.committed_at,
        reason=checkpoint.problem,
        directory=checkpoint.info.directory,
        output_key=checkpoint.info.output_key,
    )


def describe_all(state: State) -> list[agent_pb2.Checkpoint]:
    """All checkpoints that the agent remembers, the newest first."""
    ordered = sorted(state.checkpoints.values(), key=lambda checkpoint: -checkpoint.sequence)
    return [describe_checkpoint(checkpoint) for checkpoint in ordered]


def backlog_bytes(state: State) -> int:
    return sum(checkpoint.remaining_bytes for checkpoint in state.unfinished.values())


def describe_objective(state: State) -> agent_pb2.Objective | None:
    """Describe the recovery point objective; None without one."""
    plan = state.save_requests.plan(state.settings.objective)
    if plan is None:
        return None
    return agent_pb2.Objective(
        recovery_point_seconds=plan.objective.recovery_point_seconds,
        interval_seconds=plan.interval_seconds,
        reached_seconds=plan.recovery_point_seconds,
        obstacle=plan.obstacle or "",
    )


def describe_progress(state: State, now: float) -> agent_pb2.Progress | None:
    """Describe how far the trainers are; None while none of them tells its steps."""
    progress = state.progress
    if progress.newest is None:
        return None
    return agent_pb2.Progress(
        step=progress.newest.step,
        age_seconds=progress.age_seconds(now),
        steps_per_second=progress.steps_per_second(now),
        stuck=progress.stuck,
    )


def describe(state: State, now: float) -> agent_pb2.Status:
    newest, snapshot = state.newest_committed, state.newest_snapshot
    recovery_point = max((one.taken_at for one in (newest, snapshot) if one), default=None)
    rate = state.upload_rate.bytes_per_second
    backlog = backlog_bytes(state)
    budget = disk_pressure.budget_bytes(state)
    return agent_pb2.Status(
        agent_version=__version__,
        destination=state.settings.store.destination,
        live_ranks=len(state.alive_ranks),
        checkpoints=describe_all(state),
        newest_committed=describe_checkpoint(newest) if newest else None,
        newest_snapshot=describe_checkpoint(snapshot) if snapshot else None,
        not_stored=state.not_stored,
        recovery_point_age_seconds=-1.0 if recovery_point is None else max(0.0, now - recovery_point),
        backlog_bytes=backlog,
        upload_rate_bytes_per_second=rate,
        drain_seconds=0.0 if not backlog else backlog / rate if rate else -1.0,
        budget_bytes=-1 if budget is None else budget,
        terminating=state.termination.noticed,
        deadline=drain.deadline(state) or 0.0,
        storage_error=state.storage_error,
        at=now,
        objective=describe_objective(state),
        progress=describe_progress(state, now),
        set_aside=[f"{suspect.last.title}: {suspect}; {MEMORY_HINT}" for suspect in state.works_set_aside().values()],
    )
