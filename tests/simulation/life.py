"""One life from one seed: agents, a store, a virtual clock, a storm of faults, then a world that heals.

    python -m tests.simulation.life 4711        replays seed 4711 and prints every event

During the storm agents crash, answers get lost and writes land late. After it every agent is started again, nothing
fails any more but what is refused for good, and within a bounded virtual time every acknowledged announcement must have
come to its end. Agents that are told to stop then leave, whatever is refused.
"""

import sys
from collections.abc import Callable
from heapq import heappop, heappush
from random import Random
from typing import Any
from zlib import crc32

from tests.simulation.agent_model import AgentModel
from tests.simulation.scenario import (
    STORM_SECONDS,
    PlannedAnnouncement,
    Refusal,
    draw,
    fatal_save,
    journal_outages,
    refusals,
)
from tests.simulation.store_model import StoreModel, ViolationError

from keepstep_agent.core.agent import drain
from keepstep_agent.core.agent.checkpoint import Checkpoint
from keepstep_agent.core.agent.commands import PutPack, WorkCommand
from keepstep_agent.core.agent.events import (
    Announced,
    DiskRead,
    Event,
    RankRegistered,
    RanksSeen,
    StopRequested,
    TerminationNoticed,
)
from keepstep_agent.core.agent.work import STAYS_HERE
from keepstep_agent.core.model import Kind, Phase, SaveInfo
from keepstep_agent.core.stored.object_layout import marker_key

_SETTLE_SECONDS = 300.0
_STEP_LIMIT = 20_000
_ANNOUNCE_RETRIES = 8


class Life:
    """`run` raises ViolationError; `digest` is equal for equal lives."""

    def __init__(self, seed: int, *, verbose: bool = False) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.scenario = draw(self.random)
        self.journal_outages = journal_outages(Random(seed), self.scenario)
        self.fatal = fatal_save(Random(f"{seed} fatal"), self.scenario)
        self.refusals = refusals(Random(f"refused {seed}"), self.scenario)
        self.tells_md5 = self.random.random() < 0.7
        self.now = 0.0
        self.stormy, self.ending = True, False
        self.outage = False
        self.store = StoreModel()
        self.agents = [AgentModel(self, index, planned) for index, planned in enumerate(self.scenario.agents)]
        # Upload count at the last sweep, by (agent, save); writes still to land late, by save.
        self.swept: dict[tuple[int, str], int] = {}
        self.late_writes: dict[str, int] = {}
        self.digest = 0
        self._verbose = verbose
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._entries = 0

    def after(self, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        self._entries += 1
        heappush(self._heap, (self.now + max(0.0, seconds), self._entries, action, arguments))

    def note(self, agent: int, event: Event) -> None:
        line = f"{self.now:.6f} {agent} {type(event).__name__} {getattr(event, 'work', '')}"
        self.digest = crc32(line.encode(), self.digest)
        if self._verbose:
            print(f"{self.now:9.3f} agent {agent} {event}")

    def run(self) -> None:
        self._plan()
        self._run_until(STORM_SECONDS, lambda: False)
        self._heal()
        self._run_until(STORM_SECONDS + _SETTLE_SECONDS, self._settled)
        # What was set aside and tried in the storm, and did nothing, is tried again after a pause.
        due_at = max((one.due_at for agent in self.agents for one in agent.state.suspects.values()), default=0.0)
        self._run_until(due_at + _SETTLE_SECONDS, self._settled)
        if not self._settled():
            raise ViolationError(f"the world healed and this did not settle: {self._unsettled()}")
        stopped_at, self.ending = self.now, True
        for agent in self.agents:
            self._check_replay(agent)
            agent.deliver(StopRequested(at=self.now, trainers_gone=True))
        self._run_until(stopped_at + _SETTLE_SECONDS, self._all_left)
        if not self._all_left():
            raise ViolationError("an agent with nothing more to do did not exit")
        self._check_end()
        for agent in self.agents:
            self._check_next_life(agent)

    def _run_until(self, moment: float, done: Callable[[], bool]) -> None:
        steps = 0
        while self._heap and self._heap[0][0] <= moment and not (steps % 8 == 0 and done()):
            at, _, action, arguments = heappop(self._heap)
            self.now = max(self.now, at)
            action(*arguments)
            steps += 1
            if steps > _STEP_LIMIT:
                raise ViolationError("a hot loop")

    # --- what happens from outside -----------------------------------------------------------------------------

    def _plan(self) -> None:
        faults = self.scenario.faults
        for agent in self.agents:
            planned = agent.planned
            self.after(0.0, self._boot, agent)
            for at, local_rank in planned.registering:
                self.after(at, self._register, agent, local_rank)
            for at, rank in planned.deaths:
                self.after(at, self._die, agent, planned.ranks.index(rank))
            for at, is_tight in planned.pressure:
                self.after(at, self._read_disk, agent, is_tight)
            for at, grace_seconds in planned.termination.notices:
                self.after(at, self._notice, agent, grace_seconds)
            if planned.termination.stop_at is not None:
                self.after(planned.termination.stop_at, self._stop, agent)
            for start, end in self.journal_outages[agent.index]:
                self.after(start, self._set_journal, agent, False)
                self.after(end, self._set_journal, agent, True)
        for announcement in self.scenario.announcements:
            self.after(announcement.at, self._announce, announcement, _ANNOUNCE_RETRIES)
        for start, end in faults.outages:
            self.after(start, self._set_outage, True)
            self.after(end, self._set_outage, False)
        for at in faults.uploads_forgotten_at:
            self.after(at, self.store.uploads.clear)
        for at in faults.objects_lost_at:
            self.after(at, self._lose_object)

    def _boot(self, agent: AgentModel) -> None:
        agent.start(fresh=True)

    def _register(self, agent: AgentModel, local_rank: int) -> None:
        rank = agent.planned.ranks[local_rank]
        agent.deliver(RankRegistered(at=self.now, local_rank=local_rank, rank=rank))

    def _die(self, agent: AgentModel, local_rank: int) -> None:
        agent.alive.discard(local_rank)
        agent.deliver(RanksSeen(at=self.now, alive=frozenset(agent.alive)))

    def _read_disk(self, agent: AgentModel, is_tight: bool) -> None:
        free_bytes = 0 if is_tight else 1 << 40
        agent.deliver(DiskRead(at=self.now, used_bytes=0, free_bytes=free_bytes, total_bytes=1 << 40))

    def _notice(self, agent: AgentModel, grace_seconds: float | None) -> None:
        deadline = None if grace_seconds is None else self.now + grace_seconds
        agent.deliver(TerminationNoticed(at=self.now, deadline=deadline, source="storm"))

    def _stop(self, agent: AgentModel) -> None:
        agent.deliver(StopRequested(at=self.now, trainers_gone=agent.planned.termination.trainers_gone))

    def _announce(self, planned: PlannedAnnouncement, retries: int) -> None:
        agent = self.agents[planned.agent]
        if not self.stormy or agent.planned.ranks.index(planned.rank) not in agent.alive:
            return
        if agent.announce(planned) is None and retries:
            self.after(1.0, self._announce, planned, retries - 1)

    def left(self, agent: AgentModel) -> None:
        """An agent has exited. Once the storm is over, its pod is made again at once."""
        if not self.stormy and not self.ending:
            agent.start(fresh=True)

    def _set_journal(self, agent: AgentModel, writable: bool) -> None:
        agent.journal_writable = writable or not self.stormy

    def _set_outage(self, outage: bool) -> None:
        self.outage = outage

    def _lose_object(self) -> None:
        """Anything of a save that is neither committed nor about to be."""
        candidates = [
            (key, size)
            for key, size in self.store.objects.items()
            if not any(f"/{save}/" in key or f".{save}." in key for save in self._safe_saves())
        ]
        if candidates:
            del self.store.objects[self.random.choice(candidates)[0]]

    def _safe_saves(self) -> set[str]:
        saves = {announcement.info.save for announcement in self.scenario.announcements}
        return {
            save
            for save in saves
            if save in self.store.committed
            or self.late_writes.get(save)
            or any(agent.committing(save) for agent in self.agents)
        }

    def _heal(self) -> None:
        self.stormy = self.outage = False
        for agent in self.agents:
            agent.alive.clear()
            agent.journal_writable = True
            if not agent.running:
                agent.start(fresh=True)
            agent.deliver(RanksSeen(at=self.now, alive=frozenset()))

    def refusal(self, command: WorkCommand) -> Refusal | None:
        """What refuses a command for good, if anything does."""
        for refusal in self.refusals:
            if refusal.at > self.now:
                continue
            if not refusal.save and command.work.operation not in STAYS_HERE:
                return refusal
            is_of_file = command.work.path == refusal.path or (
                isinstance(command, PutPack) and any(file.path == refusal.path for file in command.pack.files)
            )
            if refusal.save and command.work.save == refusal.save and is_of_file:
                return refusal
        return None

    @property
    def _store_refuses(self) -> bool:
        return any(not refusal.save for refusal in self.refusals)

    # --- what must hold ----------------------------------------------------------------------------------------

    def _settled(self) -> bool:
        return not self._unsettled()

    def _unsettled(self) -> list[str]:
        if any(self.late_writes.values()):
            return ["late writes"]
        if any(agent.restarting for agent in self.agents):
            return ["an agent that died"]
        if self._store_refuses:
            return []
        return [
            f"agent {agent.index}: {save} is {checkpoint.phase}"
            for agent in self.agents
            if agent.running
            for save, checkpoint in agent.state.checkpoints.items()
            if not self._is_over(agent, checkpoint)
        ]

    def _is_over(self, agent: AgentModel, checkpoint: Checkpoint) -> bool:
        if checkpoint.ended:
            waits_for_newer = checkpoint.phase is Phase.FAILED
            tidied_store = checkpoint.durable or checkpoint.uploads_aborted
            return tidied_store and (checkpoint.pins_dropped or waits_for_newer)
        return not self._completable(checkpoint.info.save)

    def _completable(self, save: str) -> bool:
        """Every rank was acknowledged, no agent has given its share up, and nothing of it is refused for good."""
        if any(refusal.save in ("", save) for refusal in self.refusals):
            return False
        world_size = next(found.info.world_size for found in self.scenario.announcements if found.info.save == save)
        acked = set[int]().union(*(agent.acknowledged_ranks(save) for agent in self.agents))
        given_up = any(
            (found := agent.state.checkpoints.get(save)) is not None and found.phase in (Phase.FAILED, Phase.SHED)
            for agent in self.agents
        )
        return len(acked) == world_size and not given_up and not self._kills_for_ever(save)

    def _kills_for_ever(self, save: str) -> bool:
        """Whether its work kills, and did so once more when it was tried again last."""
        return (
            self.fatal is not None
            and self.fatal.save == save
            and any(
                suspect.was_tried_again and (save in agent.state.unread or agent.state.checkpoints[save].held_back)
                for agent in self.agents
                if (suspect := agent.state.suspects.get(save)) is not None
            )
        )

    def _all_left(self) -> bool:
        return all(
            (not agent.running and not agent.restarting) or agent.exit is not None or self._waits(agent)
            for agent in self.agents
        )

    def _waits(self, agent: AgentModel) -> bool:
        """Nobody set a deadline, and the newest needs ranks that never came."""
        newest = agent.state.newest()
        return newest is not None and not newest.ended and not self._completable(newest.info.save)

    def _check_replay(self, agent: AgentModel) -> None:
        if agent.running and agent.durable_view(agent.state) != agent.durable_view(agent.replayed(agent.left_out())):
            raise ViolationError(f"the journal of agent {agent.index} tells another story")

    def _check_end(self) -> None:
        for info in self.store.committed.values():
            self.store.check_committed(info)
        for agent in self.agents:
            for save, ranks in agent.checks.acked.items():
                self._check_outcome(agent, save, set(ranks))
        for token, upload in () if self._store_refuses else self.store.uploads.items():
            self._check_upload(token, upload.key, landed_late=upload.landed_late)

    def _check_next_life(self, agent: AgentModel) -> None:
        """Whatever the volume has of earlier lives, the trainers of the next one owe a save of their own."""
        if agent.running:
            return
        agent.alive = set(range(len(agent.planned.ranks)))
        agent.start(fresh=True)
        if agent.running:
            # The record of a save that no agent was told of is found at the start.
            agent.deliver(self._left_record(agent))
        if not agent.running:
            return
        agent.deliver(TerminationNoticed(at=self.now, deadline=None, source="the next life"))
        if agent.running and not drain.waiting_for_save(agent.state):
            raise ViolationError(f"agent {agent.index} waits for no save in its next life")

    def _left_record(self, agent: AgentModel) -> Announced:
        save = "0000beef-c000001"
        info = SaveInfo(save=save, name="checkpoint-1", step=1, kind=Kind.JUST_IN_TIME, world_size=1)
        path = "/volume/checkpoints/checkpoint-1"
        return Announced(
            at=self.now, info=info, rank=0, path=path, files=("left",), local_world_size=1, recorded_at=self.now - 1.0
        )

    def _check_outcome(self, agent: AgentModel, save: str, ranks: set[int]) -> None:
        checkpoint = agent.state.checkpoints.get(save)
        if checkpoint is None and save in agent.state.unread and self._kills_for_ever(save):
            return
        if checkpoint is None:
            raise ViolationError(f"{save} was acknowledged and is forgotten")
        if checkpoint.phase is not Phase.SHED and not ranks <= set(checkpoint.contributions):
            raise ViolationError(
                f"{save}: ranks {sorted(ranks)} were acknowledged, {sorted(checkpoint.contributions)} known"
            )
        if checkpoint.durable:
            if marker_key(checkpoint.info) not in self.store.objects:
                raise ViolationError(f"{save} is {checkpoint.phase} and has no marker")
            if save in agent.pinned():
                raise ViolationError(f"{save} is over and its pins are still there")
        elif not checkpoint.ended and self._completable(save):
            raise ViolationError(f"{save} ended as {checkpoint.phase}")

    def _check_upload(self, token: str, key: str, *, landed_late: bool) -> None:
        _, save, path = key.split("/", 2)
        owner = next(
            self.agents[announcement.agent]
            for announcement in self.scenario.announcements
            if announcement.info.save == save and any(file.path == path for file in announcement.files)
        )
        if save in owner.state.unread:
            return
        checkpoint = owner.state.checkpoints[save]
        if not checkpoint.ended or not checkpoint.pins_dropped:
            return
        if not landed_late or int(token[1:]) < self.swept.get((owner.index, save), 0):
            raise ViolationError(f"multipart upload {token} of {key} is left over")


def main() -> None:
    Life(int(sys.argv[1]), verbose=True).run()


if __name__ == "__main__":
    main()
