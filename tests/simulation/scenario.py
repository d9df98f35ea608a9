"""What happens to a life from outside, drawn from its seed: pods, saves, notices, deaths, faults. No behaviour here."""

from dataclasses import dataclass
from random import Random

from keepstep_agent.core.agent.work import Operation
from keepstep_agent.core.errors import REFUSALS, ErrorKind
from keepstep_agent.core.model import Kind, SaveInfo
from keepstep_agent.core.settings.values import (
    DiskSettings,
    Settings,
    StoreSettings,
    TerminationSettings,
    TransferSettings,
)
from keepstep_agent.core.stored.packs_and_parts import MIN_PART_BYTES, PACK_BYTES

STORM_SECONDS = 60.0
_MANY_SMALL_FILES = 0.1
_FATAL = 0.3
_STORE_THAT_REFUSES = 0.05
_FILE_THAT_IS_REFUSED = 0.15


@dataclass(frozen=True, slots=True)
class PlannedFile:
    path: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class PlannedAnnouncement:
    """One rank's part of a save. `shared`: the ranks of the pod share a directory, the first one's files are all.

    `listed`: the files that it lists, if any.
    """

    at: float
    agent: int
    rank: int
    info: SaveInfo
    files: tuple[PlannedFile, ...]
    listed: tuple[str, ...]
    shared: bool
    local_world_size: int


@dataclass(frozen=True, slots=True)
class Termination:
    """`graces`: seconds each notice gives, None: no limit."""

    notices: tuple[tuple[float, float | None], ...]
    stop_at: float | None
    trainers_gone: bool


@dataclass(frozen=True, slots=True)
class PlannedAgent:
    """`part_sizes_bytes`: what its starts are given in turn, as when an operator changes the setting.

    `pack_size_bytes`: 0 as with a journal that was begun by a version without packs.

    `registering`: local ranks that say which rank they are, and when.
    """

    ranks: tuple[int, ...]
    registering: tuple[tuple[float, int], ...]
    settings: Settings
    part_sizes_bytes: tuple[int, ...]
    pack_size_bytes: int
    crash_steps: tuple[int, ...]
    deaths: tuple[tuple[float, int], ...]
    termination: Termination
    pressure: tuple[tuple[float, bool], ...]


@dataclass(frozen=True, slots=True)
class Faults:
    """Probabilities per command, and moments. `hang`: no answer until the time-out."""

    hang: float
    fail_before: float
    fail_after: float
    land_late: float
    cancel_race: float
    refused: float
    outages: tuple[tuple[float, float], ...]
    uploads_forgotten_at: tuple[float, ...]
    objects_lost_at: tuple[float, ...]
    changed_saves: frozenset[str]


@dataclass(frozen=True, slots=True)
class Refusal:
    """What fails from `at` on, for good: all that the store is asked, or the files of one path of one save."""

    at: float
    kind: ErrorKind
    save: str = ""
    path: str = ""


@dataclass(frozen=True, slots=True)
class Scenario:
    agents: tuple[PlannedAgent, ...]
    announcements: tuple[PlannedAnnouncement, ...]
    faults: Faults


@dataclass(frozen=True, slots=True)
class FatalSave:
    """A save whose work kills each agent that does this to it, so many times per agent."""

    save: str
    operation: Operation
    kills: int


def fatal_save(random: Random, scenario: Scenario) -> FatalSave | None:
    """The save of a life whose work kills, if there is one."""
    operation = random.choice(
        (
            Operation.RECALL,
            Operation.STAGE,
            Operation.RECONCILE,
            Operation.SEND_PART,
            Operation.PUT_FILE,
            Operation.PUT_PACK,
            Operation.CHECK_SENT,
            Operation.WRITE_MANIFEST,
            Operation.COMMIT,
        )
    )
    save, kills = random.choice(scenario.announcements).info.save, random.choice((1, 2, 3, 1_000))
    return FatalSave(save, operation, kills) if random.random() < _FATAL else None


def draw(random: Random) -> Scenario:
    agent_count = random.choice((1, 1, 2))
    per_agent = random.choice((1, 1, 2))
    world_size = agent_count * per_agent
    calm = random.random() < 0.15
    ends = random.random() < 0.6
    agents = tuple(
        _agent(random, tuple(range(index * per_agent, (index + 1) * per_agent)), ends=ends, calm=calm)
        for index in range(agent_count)
    )
    announcements: list[PlannedAnnouncement] = []
    shared = per_agent > 1 and random.random() < 0.4
    pace_seconds = random.choice((1.0, 3.0, 8.0))
    at = random.uniform(0.1, 3.0)
    count = random.randint(2, 5)
    for number in range(count):
        last = number == count - 1
        kind = random.choice((Kind.JUST_IN_TIME, Kind.FINAL, Kind.PERIODIC)) if last else Kind.PERIODIC
        if last and ends and kind is Kind.JUST_IN_TIME:
            first_notice = min((at for agent in agents for at, _ in agent.termination.notices), default=at)
            at = max(at, first_notice + random.uniform(0.1, 5.0))
        info = SaveInfo(
            save=f"s{number}", name=f"checkpoint-{number + 1}", step=number + 1, kind=kind, world_size=world_size
        )
        for index, agent in enumerate(agents):
            written = {rank: _files(random, rank) for rank in agent.ranks}
            directory = tuple(file.path for files in written.values() for file in files)
            listed = directory if random.random() < 0.5 else ()
            for rank, files in written.items():
                if not files and not shared:
                    # A rank that lists its files and has none would mean: take the directory.
                    files = (PlannedFile(f"r{rank}/only", 1),)
                delay = random.choice((0.0, 0.2, random.uniform(0.0, 4.0)))
                own = tuple(file.path for file in files)
                announcements.append(
                    PlannedAnnouncement(
                        at=at + delay,
                        agent=index,
                        rank=rank,
                        info=info,
                        files=files,
                        listed=listed if shared else own,
                        shared=shared,
                        local_world_size=per_agent if shared else 1,
                    )
                )
        at += random.expovariate(1 / pace_seconds)
    return Scenario(agents, tuple(announcements), _faults(random, calm, count))


def journal_outages(random: Random, scenario: Scenario) -> tuple[tuple[tuple[float, float], ...], ...]:
    """For each agent: from when to when its journal cannot be written."""
    calm = not scenario.faults.fail_before
    return tuple(
        tuple(
            (start, start + random.uniform(0.5, 15.0))
            for start in (random.uniform(0.0, 40.0) for _ in range(0 if calm else random.choice((0, 0, 1, 2))))
        )
        for _ in scenario.agents
    )


def refusals(random: Random, scenario: Scenario) -> tuple[Refusal, ...]:
    """What no healing of the world ends; in most lives nothing."""
    if not scenario.faults.fail_before:
        return ()
    at, kind = random.uniform(0.0, 40.0), random.choice(sorted(REFUSALS))
    draw = random.random()
    if draw < _STORE_THAT_REFUSES:
        return (Refusal(at, kind),)
    if draw < _STORE_THAT_REFUSES + _FILE_THAT_IS_REFUSED:
        announced = random.choice(scenario.announcements)
        if announced.files:
            return (Refusal(at, kind, announced.info.save, random.choice(announced.files).path),)
    return ()


def _files(random: Random, rank: int) -> tuple[PlannedFile, ...]:
    sizes = (0, 1, MIN_PART_BYTES, MIN_PART_BYTES + 1, 2 * MIN_PART_BYTES, 2 * MIN_PART_BYTES + 7, 3 * MIN_PART_BYTES)
    files = [PlannedFile(f"r{rank}/f{index}", random.choice(sizes)) for index in range(random.randint(0, 3))]
    if random.random() < _MANY_SMALL_FILES:
        files += [PlannedFile(f"r{rank}/small/{index}", random.choice((0, 1, 700))) for index in range(70)]
    return tuple(files)


def _agent(random: Random, ranks: tuple[int, ...], *, ends: bool, calm: bool) -> PlannedAgent:
    settings = Settings(
        volume="/volume",
        checkpoint_directory="/volume/checkpoints",
        socket="/volume/agent.sock",
        store=StoreSettings(destination="file:///bucket"),
        transfer=TransferSettings(max_concurrency=random.choice((1, 2, 4))),
        disk=DiskSettings(eviction_threshold_percent=0.0),
        termination=TerminationSettings(drain_timeout_seconds=120.0),
    )
    part_sizes_bytes = tuple(random.choice((1, 1, 2, 4)) * MIN_PART_BYTES for _ in range(5))
    crashes = () if calm else tuple(random.randint(1, 120) for _ in range(random.choice((0, 1, 1, 2, 4))))
    deaths = tuple((random.uniform(1.0, STORM_SECONDS), rank) for rank in ranks if random.random() < 0.15)
    pressure = tuple(
        sorted((random.uniform(0.0, STORM_SECONDS), random.random() < 0.6) for _ in range(random.choice((0, 0, 1, 4))))
    )
    registering = tuple((random.uniform(0.0, 3.0), local) for local in range(len(ranks)) if random.random() < 0.8)
    return PlannedAgent(
        ranks,
        registering,
        settings,
        part_sizes_bytes,
        random.choice((0, 16 * 1024, 16 * 1024, PACK_BYTES)),
        crashes,
        deaths,
        _termination(random, ends=ends),
        pressure,
    )


def _termination(random: Random, *, ends: bool) -> Termination:
    notices = tuple(
        (random.uniform(1.0, 40.0), random.choice((None, 3.0, 10.0, 30.0, 30.0)))
        for _ in range(random.choice((0, 1, 1, 2)) if ends else 0)
    )
    stop_at = None
    if ends and random.random() < 0.8:
        first = min((at for at, _ in notices), default=random.uniform(1.0, 40.0))
        stop_at = max(0.5, first + random.uniform(-1.0, 12.0))
    return Termination(notices, stop_at, trainers_gone=random.random() < 0.5)


def _faults(random: Random, calm: bool, save_count: int) -> Faults:
    if calm:
        return Faults(0.0, 0.0, 0.0, 0.0, 0.5, 0.0, (), (), (), frozenset())
    level = random.choice((0.02, 0.1, 0.3))
    outages = tuple(
        (start, start + random.uniform(0.5, 15.0))
        for start in (random.uniform(0.0, 40.0) for _ in range(random.choice((0, 0, 1))))
    )
    changed = {f"s{random.randrange(save_count)}"} if random.random() < 0.1 else set()
    return Faults(
        hang=random.choice((0.0, 0.02, 0.1)),
        fail_before=level,
        fail_after=random.choice((0.0, level)),
        land_late=random.choice((0.0, 0.3, 0.8)),
        cancel_race=random.random(),
        refused=random.choice((0.0, 0.0, 0.02)),
        outages=outages,
        uploads_forgotten_at=tuple(random.uniform(0.0, 30.0) for _ in range(random.choice((0, 0, 1, 2)))),
        objects_lost_at=tuple(random.uniform(0.0, 30.0) for _ in range(random.choice((0, 0, 1, 2)))),
        changed_saves=frozenset(changed),
    )
