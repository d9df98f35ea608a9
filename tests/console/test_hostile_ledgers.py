"""Whatever a ledger and the times of markers say within their limits, the run's pages are shown."""

import random

import pytest
from tests.console.conftest import Opener
from tests.console.stored_runs import marker_of
from tests.core.noted_lives import NotedLife

from keepstep_agent.core.limits import STEP, UNIX_SECONDS
from keepstep_agent.core.stored.ledger import (
    AgentEnded,
    AgentLife,
    Alive,
    Resumed,
    SaveCommitted,
    SaveLost,
    encode_life,
)
from keepstep_agent.core.stored.object_layout import ledger_key

LARGEST = 2**63 - 1
KINDS = ["periodic", "just-in-time", "final", "snapshot", "<kind>"]


def strange_life(chance: random.Random, agent: str) -> AgentLife:
    """Entries in no order, with the least and the greatest numbers that there may be."""

    def at() -> float:
        return chance.choice([0.0, 1.0, 1.7e9, 1.7e9 + 1, float(UNIX_SECONDS), chance.uniform(0, 2e3)])

    def step() -> int:
        return chance.choice([0, 1, 2, STEP])

    life = NotedLife(agent, attempt=chance.choice(["", "job"]), place=chance.choice(["", "p"]))
    adding = [
        lambda: life.start(
            at(),
            start=chance.choice(["", "same"]),
            restore=chance.choice([None, (at(), at())]),
            resumed=chance.choice(list(Resumed)),
            step=step(),
            save=f"save-{step()}",
        ),
        lambda: life.ranks(at(), chance.randrange(3)),
        lambda: life.save(
            chance.choice([None, at()]),
            at(),
            step(),
            kind=chance.choice(KINDS),
            stall_seconds=chance.choice([None, 0.0, 3e7]),
            units=chance.choice([{}, {"<unit>": 1e15}]),
        ),
        lambda: life.add(SaveCommitted, at(), save=f"save-{step()}", size_bytes=LARGEST, upload_seconds=0.0),
        lambda: life.add(SaveLost, at(), save=f"save-{step()}", outcome=chance.choice(["shed", "?"]), reason="<why>"),
        lambda: life.notice(at()),
        lambda: life.add(Alive, at(), ranks=chance.randrange(2), step=step()),
        lambda: life.add(AgentEnded, at(), code=chance.choice([0, 255]), program_failed=chance.random() < 0.5),
    ]
    for _ in range(chance.randrange(1, 20)):
        chance.choice(adding)()
    return life.life


@pytest.mark.parametrize("seed", range(10))
async def test_no_ledger_breaks_a_page(console: Opener, seed: int) -> None:
    opened, chance = await console(), random.Random(seed)
    for number in range(20):
        for agent in range(chance.randrange(1, 4)):
            life = strange_life(chance, f"agent-{agent}")
            key = ledger_key(life.attempt, 1.0, f"{agent}")
            opened.put(f"run-{number}/", {key: (encode_life(life), 0.0)})
        for step in chance.sample([0, 1, STEP], chance.randrange(3)):
            key, body = marker_of(step, at=chance.choice([0.0, 1.7e9]))
            opened.put(f"run-{number}/", {key: (body, chance.choice([-1e18, 0.0, 1.7e9, 1e18]))})
    await opened.runs.read_all()
    assert [run.error for run in opened.runs.known.values() if run.error] == []
    for sort in ("recovery", "step", "goodput", "lost", "kept", "stored", "sign", "state"):
        assert (await opened.get(f"/?sort={sort}"))[0] == 200
    for name in opened.runs.known:
        for page in ("run", "api/run"):
            status, text, _ = await opened.get(f"/{page}?name={name}")
            assert status == 200
            assert page.startswith("api") or "<kind>" not in text
