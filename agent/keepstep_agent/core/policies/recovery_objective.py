"""How often to save, so that the newest committed checkpoint never gets older than an objective.

Just before a checkpoint is committed, the one before it is as old as the interval between them and the time that the
new one took to be written, uploaded and committed. So the interval follows from the objective and that time. It has two
lower limits: one save at a time, and the share of the training's time that saves may take.
"""

from collections import deque
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from keepstep_agent.core.settings.values import ObjectiveSettings

_SAVES_COUNTED: Final = 3
_ANSWERS_COUNTED: Final = 16
"""More, because what trainers are at when they are asked, such as an evaluation, comes again after many saves."""
_MARGIN: Final = 0.1
"""Share of the recovery point, and of the overhead, that is kept for a save that takes longer than those before it."""
_LEAST_SHARE: Final = 0.25
"""The share of the interval that lies between the beginnings of two saves at least, whatever becomes of them."""
_BEGUN_KEPT: Final = 64
_PATIENCE: Final = 3.0
"""After so many recovery points, a checkpoint that is still on its way holds up no further request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What somebody wants: the oldest that the recovery point may get, and the largest share of time for saves.

    `max_overhead` 0: saves may take any share.
    """

    recovery_point_seconds: float
    max_overhead: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTimes:
    """How long the stages of a save take, in seconds.

    From the request until the trainers begin, until they have announced it, and until it is committed. Training stands
    still for `stall_seconds` of this.
    """

    answer_seconds: float
    write_seconds: float
    commit_seconds: float
    stall_seconds: float


class Obstacle(StrEnum):
    """Why an objective cannot be had. Each value says what would help."""

    OVERHEAD = (
        "let saves take a larger share of the time, or make them shorter: asynchronous saves wait for a copy only"
    )
    ANSWER = "the trainers begin a save late: they can between steps, so shorten steps and what runs between them"
    WRITE = "write faster: a faster volume, or each rank its own part of the checkpoint"
    COMMIT = "upload faster: more bandwidth or CPU for the agent, a nearer store, or smaller checkpoints"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """How long after a checkpoint the next one is taken, and how old the recovery point then gets.

    `obstacle`: why that is older than the objective; None if it is not.
    """

    objective: Objective
    interval_seconds: float
    recovery_point_seconds: float
    obstacle: Obstacle | None = None


def plan_saves(objective: Objective, times: SaveTimes | None) -> SavePlan:
    """Return when to save. Without measured times half of the recovery point is left for the first save."""
    wanted_seconds = objective.recovery_point_seconds
    if times is None:
        return SavePlan(objective=objective, interval_seconds=wanted_seconds / 2, recovery_point_seconds=wanted_seconds)
    durable_seconds = times.write_seconds + times.commit_seconds
    by_objective = wanted_seconds * (1 - _MARGIN) - durable_seconds
    one_at_a_time = durable_seconds + times.answer_seconds
    by_overhead = _shortest_interval_seconds(objective, times.stall_seconds)
    interval_seconds = max(by_objective, one_at_a_time, by_overhead)
    reached_seconds = interval_seconds + durable_seconds
    obstacle = None
    if reached_seconds > wanted_seconds:
        stages = {
            Obstacle.ANSWER: times.answer_seconds,
            Obstacle.WRITE: times.write_seconds,
            Obstacle.COMMIT: times.commit_seconds,
        }
        obstacle = Obstacle.OVERHEAD if by_overhead >= one_at_a_time else max(stages, key=lambda stage: stages[stage])
    return SavePlan(
        objective=objective,
        interval_seconds=interval_seconds,
        recovery_point_seconds=reached_seconds,
        obstacle=obstacle,
    )


def _shortest_interval_seconds(objective: Objective, stall_seconds: float) -> float:
    """Return how long after a save has begun the next one may begin, by the time that saves may take."""
    share = objective.max_overhead * (1 - _MARGIN)
    return stall_seconds / share if share else 0.0


def _recent() -> deque[float]:
    return deque(maxlen=_SAVES_COUNTED)


@dataclass(slots=True)
class SaveHistory:
    """What the last saves took, in seconds. For each stage the longest of the last ones counts."""

    _answers: deque[float] = field(default_factory=lambda: deque(maxlen=_ANSWERS_COUNTED))
    _writes: deque[float] = field(default_factory=_recent)
    _commits: deque[float] = field(default_factory=_recent)
    _stalls: deque[float] = field(default_factory=_recent)
    _ages: deque[float] = field(default_factory=_recent)

    def answered(self, seconds: float) -> None:
        """The trainers began a save, so long after they were asked for it."""
        self._answers.append(seconds)

    def committed(self, *, write_seconds: float, commit_seconds: float) -> None:
        """A checkpoint is committed."""
        self._writes.append(write_seconds)
        self._commits.append(commit_seconds)

    def stalled(self, seconds: float) -> None:
        """Training stood still for a save, whatever became of it."""
        self._stalls.append(seconds)

    def replaced(self, age_seconds: float) -> None:
        """A newer recovery point has replaced one that had become so old."""
        self._ages.append(age_seconds)

    @property
    def times(self) -> SaveTimes | None:
        """The stages of the next save, as far as the last ones tell; None before the first."""
        if not self._commits:
            return None
        return SaveTimes(
            answer_seconds=max(self._answers, default=0.0),
            write_seconds=max(self._writes),
            commit_seconds=max(self._commits),
            stall_seconds=self.stall_seconds,
        )

    @property
    def stall_seconds(self) -> float:
        """How long training stands still for a save; 0 before the first."""
        return max(self._stalls, default=0.0)

    @property
    def oldest_seconds(self) -> float:
        """How old the recovery point became between the last commits; 0 if it was never replaced."""
        return max(self._ages, default=0.0)


@dataclass(slots=True)
class SaveRequests:
    """When to ask the trainers for a save. It measures their own saves too, because these move the next request.

    `training_since`: when the newest trainer came to life. `begun_at`: when the last saves began, by save id.
    `writing`: the last of them, while it is neither announced nor given up. `requested_at`: when a save was requested
    that has not begun yet; None if there is none. All times are unix seconds.
    """

    program_objective: Objective | None = None
    training_since: float = 0.0
    begun_at: dict[str, float] = field(default_factory=dict)
    writing: str = ""
    requested_at: float | None = None
    history: SaveHistory = field(default_factory=SaveHistory)

    def objective(self, settings: ObjectiveSettings) -> Objective | None:
        """Return the objective in force: that of the settings, else that of the program; None without one."""
        asked = self.program_objective
        if settings.recovery_point or asked is None:
            asked = Objective(recovery_point_seconds=settings.recovery_point, max_overhead=settings.max_overhead)
        elif not asked.max_overhead:
            asked = replace(asked, max_overhead=settings.max_overhead)
        return asked if asked.recovery_point_seconds else None

    def plan(self, settings: ObjectiveSettings) -> SavePlan | None:
        """Return how often saves are due; None without an objective."""
        wanted = self.objective(settings)
        return None if wanted is None else plan_saves(wanted, self.history.times)

    def due_at(self, wanted: Objective, *, newest_taken_at: float, is_on_its_way: bool) -> float:
        """Return when to ask for the next save.

        `newest_taken_at`: when the newest checkpoint was taken that is committed or may still be; 0 if there is none.
        `is_on_its_way`: it is being uploaded. Neither this nor a save that is being written holds up the next one for
        more than three recovery points: it may never end.
        """
        times = self.history.times
        plan = plan_saves(wanted, times)
        if self.requested_at is not None:
            # The trainers still know of it, unless they refused or have failed to save.
            return self.requested_at + max(wanted.recovery_point_seconds, plan.interval_seconds)
        taken_at = max(self.training_since, newest_taken_at)
        due = taken_at + plan.interval_seconds
        if times is not None:
            due -= times.answer_seconds
        # Also where saves fail, and no checkpoint is ever taken.
        last_begun_at = max(self.begun_at.values(), default=0.0)
        least_seconds = _shortest_interval_seconds(wanted, self.history.stall_seconds)
        due = max(due, last_begun_at + max(least_seconds, _LEAST_SHARE * plan.interval_seconds))
        in_flight_since = [self.begun_at[self.writing]] if self.writing else []
        in_flight_since += [taken_at] if is_on_its_way else []
        return max([due, *(since + _PATIENCE * wanted.recovery_point_seconds for since in in_flight_since)])

    def begun(self, save: str, at: float) -> None:
        """The trainers have begun a save, or announce one without having asked for room."""
        if self.requested_at is not None:
            self.history.answered(max(0.0, at - self.requested_at))
            self.requested_at = None
        self.begun_at.setdefault(save, at)
        # Trainers that begin a save have written the one before.
        self.writing = save
        if len(self.begun_at) > _BEGUN_KEPT:
            del self.begun_at[next(one for one in self.begun_at if one != save)]

    def written(self, save: str) -> None:
        """A save is announced or given up."""
        if self.writing == save:
            self.writing = ""

    def trainers_started(self, now: float) -> None:
        """There are new trainers, which know of no earlier request."""
        self.training_since, self.requested_at = now, None
        self.writing = ""
