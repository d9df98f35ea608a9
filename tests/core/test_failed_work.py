"""What follows when a piece of work has failed for good."""

import pytest
from tests.core.play import Play

from keepstep_agent.core.agent.commands import Command, Release, Stage
from keepstep_agent.core.agent.events import Announced, Event, Failed, Started, WorkFailed
from keepstep_agent.core.agent.reducer import Ready, advance
from keepstep_agent.core.agent.state import State
from keepstep_agent.core.agent.work import Operation, WorkId
from keepstep_agent.core.errors import ErrorKind
from keepstep_agent.core.model import Kind, Phase, SaveInfo
from keepstep_agent.core.settings.values import Settings, StoreSettings

INFO = SaveInfo(save="save-1", name="checkpoint-1", step=1, kind=Kind.PERIODIC, world_size=1)
ANNOUNCED = Announced(
    at=1.0, info=INFO, rank=0, path="/volume/checkpoint-1", files=(), local_world_size=1, signature=""
)


def after(state: State, *events: Event) -> Ready:
    """What the last of the events leads to."""
    for event in events:
        ready = advance(state, event)
    return ready


def kinds(commands: tuple[Command, ...]) -> list[type[Command]]:
    return [type(command) for command in commands]


def test_work_that_cannot_succeed_is_not_tried_once_more_beside_its_failure() -> None:
    settings = Settings(
        volume="/volume",
        checkpoint_directory="/volume/checkpoints",
        socket="/volume/agent.sock",
        store=StoreSettings(destination="file:///bucket"),
    )
    state = State(settings=settings)
    staging = after(state, Started(at=0.0, fresh=True), ANNOUNCED)
    (stage,) = staging.commands
    assert isinstance(stage, Stage)
    failed = WorkFailed(
        at=2.0, work=stage.work, kind=ErrorKind.FILE_MISSING, message="it is gone", hint="write it", jitter=0.0
    )
    ready = after(state, failed)
    assert [type(event) for event in ready.durable] == [Failed]
    assert kinds(ready.commands) == [Release]


@pytest.mark.parametrize("kind", [ErrorKind.VOLUME_UNUSABLE, ErrorKind.ALREADY_EXISTS])
@pytest.mark.parametrize(
    "operation", [Operation.PUT_FILE, Operation.CHECK_SENT, Operation.WRITE_MANIFEST, Operation.COMMIT]
)
def test_what_fails_after_staging_for_a_reason_that_may_pass_is_tried_until_it_succeeds(
    operation: Operation, kind: ErrorKind
) -> None:
    play = Play()
    play.announce("save")
    failures = 0
    while play.phase("save") is not Phase.RELEASED:
        if not play.in_flight:
            play.wait_until(lambda: bool(play.in_flight))
        work = next(iter(play.in_flight))
        if work.operation is operation and failures < 50:
            failures += 1
            play.fail(work, kind)
        else:
            play.answer(work)
    assert failures == 50


def test_a_volume_that_cannot_be_staged_on_is_answered_to_whoever_announced() -> None:
    play = Play()
    play.announce_only("save")
    play.fail(WorkId(Operation.STAGE, "save", 0), ErrorKind.VOLUME_UNUSABLE)
    assert play.phase("save") is Phase.FAILED
