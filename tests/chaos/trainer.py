"""One rank of the job under chaos: a training loop with the real client, which writes what `content` says.

Tells on its standard output what the oracle has to know: which save belongs to which step before anything of it can be
committed, and which announcement the agent has acknowledged.
"""

import os
import time
from pathlib import Path
from typing import Any

from tests.chaos.content import rank_files
from tests.chaos.rank_store import KeyClient, become_rank

import keepstep
from keepstep.agent_client import channel
from keepstep.agent_client.client import Agent
from keepstep.session import PendingSave, Session

_STEP_SECONDS = 0.1
_EVERY = 2
_LOOK_SECONDS = 0.005


def say(text: str) -> None:
    print(text, flush=True)


def tell_of_saves() -> None:
    """Print each save as it begins, and each announcement that an agent took."""
    begin, announce = Session.begin, Agent.announce

    def begin_aloud(self: Session, *arguments: Any, **named: Any) -> PendingSave:
        begun = begin(self, *arguments, **named)
        say(f"begun {begun.step} {begun.save}")
        return begun

    def announce_aloud(self: Agent, **named: Any) -> bool | None:
        announced = announce(self, **named)
        if announced:
            say(f"acknowledged {named['step']} {named['save']}")
        return announced

    Session.begin = begin_aloud  # type: ignore[method-assign]
    Agent.announce = announce_aloud  # type: ignore[method-assign]


def be_patient() -> None:
    """An agent that answers late on a busy machine is not away, and one that was away is asked soon again."""
    channel.ANNOUNCE_SECONDS = 60.0  # type: ignore[misc]
    channel.BACK_OFF_SECONDS = 1.0  # type: ignore[misc]
    channel.Channel._call.__kwdefaults__["deadline_seconds"] = 10.0  # type: ignore[index]


def wait_for_others(store: KeyClient, rank: int, world_size: int, step: int) -> None:
    """As the collective at the end of a step: ranks are at most one step apart."""
    store.set(f"step/{rank}", str(step))
    for other in range(world_size):
        key = f"step/{other}"
        while not store.check([key]) or int(store.get(key)) < step:
            time.sleep(_LOOK_SECONDS)


def main() -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    run, attempt = os.environ["CHAOS_RUN"], os.environ["CHAOS_ATTEMPT"]
    store = become_rank(int(os.environ["CHAOS_KEYS"]), rank, world_size)
    tell_of_saves()
    be_patient()
    checkpointer = keepstep.Checkpointer()
    path = checkpointer.resume()
    step = int((path / f"rank-{rank}" / "step").read_text().split()[2]) if path else 0
    say(f"resumed {step}")
    while not checkpointer.stopping:
        time.sleep(_STEP_SECONDS)  # the work of one step
        step += 1
        wait_for_others(store, rank, world_size, step)
        if checkpointer.should_save(step, every=_EVERY):
            with checkpointer.save(step) as directory:
                for name, body in rank_files(run, attempt, step, rank).items():
                    file = Path(directory, name)
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_bytes(body)
        say(f"step {step}")
    checkpointer.finish()


if __name__ == "__main__":
    main()
