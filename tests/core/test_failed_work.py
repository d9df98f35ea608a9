"""What follows when a piece of work has failed for good."""

from mooring_agent.core.commands import Command, Release, Stage
from mooring_agent.core.errors import ErrorKind
from mooring_agent.core.events import Announced, Event, Failed, Started, WorkFailed
from mooring_agent.core.model import Kind, SaveInfo
from mooring_agent.core.reducer import Ready, advance
from mooring_agent.core.settings import Settings, StoreSettings
from mooring_agent.core.state import State

INFO = SaveInfo(save="save-1", name="checkpoint-1", step=1, kind=Kind.PERIODIC, world_size=1)
ANNOUNCED = Announced(
    at=1.0, info=INFO, rank=0, source="/volume/checkpoint-1", files=(), local_world_size=1, signature=""
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
