"""One rank of a small job: `trainer.py <scenario>`. It takes a step for every line on its standard input.

Every step ends in a collective, as real ones do, so that ranks are at most one step apart. Prints what it does.
"""

import atexit
import errno
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as distributed
from tests.harness.agent_process import wait_until
from tests.harness.bounds import HANG_SECONDS

import keepstep
from keepstep import checkpoint_writer
from keepstep.agent_client import channel
from keepstep.asynchronous_saves.background_writer import BackgroundWriter
from keepstep.asynchronous_saves.empty_file import EmptyFile
from keepstep.checkpoints.records import Kind, Record
from keepstep.checkpoints.staged_save import StagedSave
from keepstep.framework_run import FrameworkRun
from keepstep.framework_run import run as framework_run
from keepstep.gate import Action
from keepstep.ranks import coordinator, rendezvous
from keepstep.session import Session

RANK = int(os.environ["RANK"])

# On a slow machine an agent that answers is not away.
channel.ANNOUNCE_SECONDS = HANG_SECONDS  # type: ignore[misc]
channel.Channel._call.__kwdefaults__["deadline_seconds"] = HANG_SECONDS  # type: ignore[index]


if "WRITE_SECONDS" in os.environ:
    vars(checkpoint_writer)["WRITE_SECONDS"] = float(os.environ["WRITE_SECONDS"])


def say(text: str) -> None:
    print(text, flush=True)


def steps(begin: int = 0) -> int:
    """The number of the next step, once the test lets it begin."""
    assert sys.stdin.readline(), "the test has gone"
    distributed.all_reduce(torch.ones(1))
    return begin + 1


def checkpointer() -> None:
    """A plain loop in which every rank writes a file."""
    saver = keepstep.Checkpointer()
    path = saver.resume()
    step = int((path / f"rank-{RANK}").read_text()) if path else 0
    say(f"begin {step}")
    while not saver.stopping and step < int(os.environ.get("STEPS", "100000")):
        step = steps(step)
        raises = RANK == 1 and step % int(os.environ.get("RAISE_EVERY", "1000")) == 0
        if saver.should_save(step, every=int(os.environ.get("EVERY", "0"))):
            with suppress(ArithmeticError) if raises else nullcontext(), saver.save(step) as directory:
                if raises:
                    raise ArithmeticError("caught outside of the save")
                if os.environ.get("FAIL_RANK") == str(RANK):
                    raise SystemExit("this rank cannot write")
                if os.environ.get("FULL_AT") == f"{RANK} {step}":
                    raise OSError(errno.ENOSPC, "No space left on device")
                if "BARRIER" in os.environ:
                    distributed.barrier()
                (directory / f"rank-{RANK}").write_text(str(step))
            say(f"saved {step}")
        if "KEYS" in os.environ:
            say(f"keys {distributed.distributed_c10d._get_default_store().num_keys()}")
        say(f"step {step}")
    saver.finish()
    say("done")


def checkpointer_that_a_rank_is_late_to_resume() -> None:
    """Rank 1 has come, and resumes when the test says so."""
    saver = keepstep.Checkpointer()
    assert saver._session.context().coordinator.ranks.world_size == distributed.get_world_size()
    # Only from now on, when both are there. Rank 0, which has the store, stays until rank 1 has read its answer.
    coordinator.PATIENCE_SECONDS = 1.0  # type: ignore[misc]
    coordinator.StoreCoordinator.agree.__kwdefaults__["seconds"] = 1.0  # type: ignore[index]
    coordinator._READ_SECONDS = HANG_SECONDS  # type: ignore[misc]
    if RANK == 1:
        sys.stdin.readline()
    try:
        saver.resume()
    except keepstep.KeepstepError as error:
        say(f"{type(error).__name__}: {error}")
    saver.close()


def asynchronous_checkpointer_with_a_slow_rank() -> None:
    """Rank 1 writes its second checkpoint when all have decided about it, before the just-in-time save."""
    saver = keepstep.Checkpointer(asynchronous=True, keep_local=3)
    decided = threading.Event()
    make_time, find = Session.make_time, EmptyFile.find

    def make_time_and_tell(session: Session, writer: BackgroundWriter) -> None:
        make_time(session, writer)
        decided.set()

    def find_when_decided(file: EmptyFile, root: Path) -> Path | None:
        assert decided.wait(HANG_SECONDS)
        return find(file, root)

    Session.make_time = make_time_and_tell  # type: ignore[assignment,method-assign]
    step = 0
    while not saver.stopping:
        if step == 1 and RANK == 1:
            saver._writer.wait()
            EmptyFile.find = find_when_decided  # type: ignore[assignment,method-assign]
        if step == 2 and RANK == 0:
            wait_until(lambda: saver._writer.in_flight() is None, HANG_SECONDS, "rank 0 has written its files")
            os.kill(os.getpid(), signal.SIGTERM)
        step = steps(step)
        if saver.should_save(step, every=1 if step <= 2 else 0):
            with saver.save(step) as directory:
                for name in "ab":
                    torch.save(torch.ones(10_000) * step, directory / f"{name}-{RANK}")
    saver.finish()


def rank_0_alone() -> None:
    """As Horovod's users save: rank 0 writes, and no other rank has anything of ours."""
    saver = keepstep.Checkpointer(rank0_only=True) if RANK == 0 else None
    step = 0
    while step < 3:
        step = steps(step)
        if saver is not None and saver.should_save(step, every=1):
            with saver.save(step) as directory:
                (directory / "model").write_text(str(step))
        say(f"step {step}")
    if saver is not None:
        saver.finish()
    say("done")


def framework() -> None:
    """A framework that writes its own directories; an evaluation of three batches follows every second step."""
    run = FrameworkRun.current()
    newest = run.newest()
    step = int((newest / f"rank-{RANK}").read_text()) if newest else 0
    say(f"begin {step}")
    output = Path(os.environ["OUTPUT"])

    def save(step: int) -> None:
        directory = output / f"out-{step}"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"rank-{RANK}").write_text(str(step))
        say(f"announced {step} {run.announce_written(directory, step)}")

    def obey(ask: Action, step: int) -> None:
        if ask is not Action.NOTHING:
            save(step)
        if ask is Action.SAVE_AND_EXIT:
            assert run.stopping
            run.leave()

    while step < int(os.environ.get("STEPS", "100000")):
        step = steps(step)
        obey(run.action_at(step), step)
        for tick in range(1, 4) if step % 2 == 0 else ():
            steps()
            say(f"tick {step} {tick}")
            obey(run.action_at(step, tick), step)
        say(f"step {step}")
    run.close()
    say("done")


def asynchronous_framework() -> None:
    """The checkpoint is announced when its future is done, and leaving waits for it."""
    run = FrameworkRun.current()
    directory = Path(os.environ["OUTPUT"]) / "out-1"
    directory.mkdir(parents=True, exist_ok=True)
    done: Future[None] = Future()
    run.announce_when(done, directory, 1)
    steps()
    (directory / f"rank-{RANK}").write_text("1")
    if os.environ.get("FAIL_RANK") == str(RANK):
        done.set_exception(OSError("no space"))
    else:
        done.set_result(None)
    run.close()
    say("done")


def write_dcp(directory: Path, *ranks: int) -> None:
    """This rank's part of what `ranks` write, which the directory watch would find."""
    (directory / f"__{RANK}_0.distcp").write_text("1")
    if RANK == 0:
        (directory / ".metadata").write_text(" ".join(f"__{rank}_0.distcp" for rank in ranks))


def framework_with_a_slow_rank() -> None:
    """Rank 1 has its part when the test says so."""
    run = FrameworkRun.current()
    assert run.newest() is None
    directory = Path(os.environ["KEEPSTEP_VOLUME"]) / "checkpoints" / "checkpoint-1"
    if RANK == 0:
        directory.mkdir(parents=True)
        write_dcp(directory, 0)
        say("written")
    else:
        sys.stdin.readline()
    say(f"announced {run.announce_written(directory, 1)}")
    run.close()


def framework_of_one_file() -> None:
    """Rank 0 writes the one file, as Lightning does, whose folder is there in all pods, and perhaps an older one."""
    run = FrameworkRun.current()
    path = Path(os.environ["OUTPUT"]) / "epoch=0-step=1.ckpt"
    path.parent.mkdir(parents=True, exist_ok=True)
    if RANK == 0:
        path.write_text("all")
    distributed.barrier()
    say(f"announced {run.announce_written(path, 1)}")
    run.close()


def framework_with_a_missing_part() -> None:
    """A folder of which a pod has nothing is no whole checkpoint."""
    run = FrameworkRun.current()
    directory = Path(os.environ["OUTPUT"]) / "out-1"
    if RANK == 0:
        directory.mkdir(parents=True)
        (directory / "rank-0").write_text("1")
    distributed.barrier()
    say(f"announced {run.announce_written(directory, 1)}")
    run.close()


def framework_of_which_a_rank_fails_once() -> None:
    """Rank 1 cannot write its part of step 2, and the program goes on; it adds a file after each save."""
    # Only the next save and the end show that the program is done.
    setattr(framework_run, "wait_until_quiet", lambda _, wait_no_more: wait_no_more.wait())  # noqa: B010
    run = FrameworkRun.current()
    for step in (1, 2, 3):
        place = Path(os.environ["OUTPUT"]) / f"step-{step}"

        def write(path: Path, step: int = step) -> None:
            if RANK == 1 and step == 2:
                raise OSError("no room")
            path.mkdir(exist_ok=True)
            (path / f"rank-{RANK}").write_text("1")

        try:
            is_saved = run.save(place, step, write, asynchronous=False, program_folder=True)
        except OSError:
            is_saved = False
        else:
            run.announce()
        distributed.barrier()
        if RANK == 0 and is_saved:
            (place / "state.json").write_text("{}")
        say(f"saved {step} {is_saved}")
    distributed.barrier()
    run.close()
    say("done")


def framework_that_wrote_nothing() -> None:
    """Its callbacks have moved the checkpoint away, say."""
    run = FrameworkRun.current()
    say(f"announced {run.announce_written(Path(os.environ['OUTPUT']) / 'out-1', 1, Kind.FINAL)} {run.stopping}")
    run.close()


def framework_that_rank_1_does_without() -> None:
    """Rank 0 waits for it a moment at the first question, and goes on like it."""
    if RANK == 0:
        rendezvous.rendezvous.__kwdefaults__["seconds"] = 0.5  # type: ignore[index]
        run = FrameworkRun.current()
        asked = run.action_at(1)
        say(f"{asked} {run.same(1, 'batches')} {run.gather(1, 'state')} {run.admits(2)} {run.action_at(2)}")
        run.close()
    steps()
    say("done")


def program_that_closes_nothing() -> None:
    """It just ends, as one does by an exception of its own."""

    def tell() -> None:
        say(f"gates {[thread.name for thread in threading.enumerate()].count('keepstep-gate')}")

    # What is registered first comes last, after all that is made below.
    atexit.register(tell)
    saver = keepstep.Checkpointer()
    assert saver.resume() is None
    tell()
    raise SystemExit(3)


def checkpointer_with_a_slow_pod() -> None:
    """Rank 1 puts its part in its place when the test says so."""
    saver = keepstep.Checkpointer()
    assert saver.resume() is None
    if RANK == 1:
        put_in_place = StagedSave.put_in_place

        def put_in_place_at_last(self: StagedSave, record: Record | None, records: Path) -> Record | None:
            sys.stdin.readline()
            return put_in_place(self, record, records)

        StagedSave.put_in_place = put_in_place_at_last  # type: ignore[method-assign]
    with saver.save(1) as directory:
        write_dcp(directory, 0, 1)
    saver.finish()
    say("done")


def die(where: str) -> None:
    """End rank 1 there, if the test says so."""
    if RANK == 1 and os.environ.get("KILLED") == where:
        os.kill(os.getpid(), signal.SIGKILL)
    if RANK == 1 and os.environ.get("STOPPED") == where:
        os.kill(os.getpid(), signal.SIGSTOP)
    if RANK == 1 and os.environ.get("RAISES") == where:
        raise ArithmeticError("this rank fails")


def checkpointer_of_which_rank_1_dies() -> None:
    """When all have met. With ASYNCHRONOUS the files are written behind the training."""
    saver = keepstep.Checkpointer(asynchronous="ASYNCHRONOUS" in os.environ)
    assert saver._session.context().coordinator.ranks.world_size == 2
    die("before it resumes")
    saver.resume()
    for step in (1, 2):
        distributed.barrier()
        if step == 2:
            die("before a save")
        if saver.should_save(step, every=1):
            with saver.save(step) as directory:
                torch.save({"step": step}, directory / f"rank-{RANK}.pt")
                if step == 2:
                    die("in a save")
        say(f"passed {step}")
    die("after its saves")
    if "HANGS" in os.environ:
        # In C++, as in a collective of a backend that does not notice that a rank is gone.
        distributed.distributed_c10d._get_default_store().wait(["never"], timedelta(seconds=HANG_SECONDS))
    distributed.barrier()


def framework_of_which_rank_1_dies() -> None:
    run = FrameworkRun.current()
    assert run.same(0, "met")
    die("before it resumes")
    run.newest()
    for step in (1, 2):
        distributed.barrier()
        if step == 2:
            die("before a save")
        if run.admits(step):

            def write(path: Path, step: int = step) -> None:
                path.mkdir(exist_ok=True)
                torch.save({"step": step}, path / f"rank-{RANK}.pt")
                if step == 2:
                    die("in a save")

            place = Path(os.environ["OUTPUT"]) / f"checkpoint-{step}"
            run.save(place, step, write, asynchronous="ASYNCHRONOUS" in os.environ)
            run.announce()
        say(f"passed {step}")
    distributed.barrier()


SCENARIOS: dict[str, Callable[[], None]] = {
    scenario.__name__: scenario
    for scenario in (
        checkpointer,
        checkpointer_that_a_rank_is_late_to_resume,
        asynchronous_checkpointer_with_a_slow_rank,
        rank_0_alone,
        framework,
        asynchronous_framework,
        framework_with_a_slow_rank,
        framework_of_one_file,
        framework_with_a_missing_part,
        framework_of_which_a_rank_fails_once,
        framework_that_wrote_nothing,
        framework_that_rank_1_does_without,
        program_that_closes_nothing,
        checkpointer_with_a_slow_pod,
        checkpointer_of_which_rank_1_dies,
        framework_of_which_rank_1_dies,
    )
}

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    distributed.init_process_group("gloo")
    SCENARIOS[sys.argv[1]]()
    distributed.destroy_process_group()
