"""A volume that is read-only, full or another agent's, or has a damaged journal: said, and nothing is lost."""

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.harness.agent_process import AgentProcess, tree
from tests.harness.bucket_view import BucketView
from tests.harness.small_volume import mounted, remount
from tests.integration.bad_input.agent_calls import MIB, good_checkpoint, make_agent, refusal
from tests.servers.fault_proxy import FaultProxy
from tests.servers.server import Bucket

from keepstep_agent.adapters.journal import SqliteJournal
from keepstep_agent.adapters.volume.disk import Reserve
from keepstep_api.names import AGENT_STATE_DIRECTORY, JOURNAL, STATE_DIRECTORY


@pytest.mark.root
def test_a_read_only_volume_is_a_clear_error_at_the_start(tmp_path: Path, rclone_bucket: Bucket) -> None:
    with mounted(tmp_path / "volume", 32 * MIB) as volume:
        agent = make_agent(volume, rclone_bucket)
        agent.checkpoints.mkdir()
        remount(volume, "ro")
        assert agent.start_refused() == 1
        error, hint = agent.log_text().splitlines()[-2:]
        assert error == f"error: cannot write to the volume {volume}: Read-only file system"
        assert hint.startswith("hint: mount the volume read-write")
        remount(volume, "rw")
        with agent:
            agent.wait_committed(agent.announce(good_checkpoint(agent), 7).save)


@pytest.mark.root
def test_a_full_volume_refuses_an_announcement_and_takes_it_once_there_is_room(
    tmp_path: Path, rclone_bucket: Bucket
) -> None:
    with mounted(tmp_path / "volume", 32 * MIB) as volume, make_agent(volume, rclone_bucket) as agent:
        directory = good_checkpoint(agent)
        filler = volume / "filler"
        # Without what is set aside for a last save, see test_full_volume.
        (volume / ".keepstep" / "reserve").unlink()
        fill(filler)
        code, reason, hint = refusal(lambda: agent.announce(directory, 7))
        assert (code, reason) == ("RESOURCE_EXHAUSTED", "VOLUME_UNUSABLE")
        assert "sizeLimit" in hint
        filler.unlink()
        agent.wait_committed(agent.announce(directory, 7).save)
        assert [row["problems"] for row in BucketView(rclone_bucket).verify()] == [[]]


@pytest.mark.root
def test_an_agent_cannot_start_on_a_full_volume_and_says_why(tmp_path: Path, rclone_bucket: Bucket) -> None:
    with mounted(tmp_path / "volume", 8 * MIB) as volume:
        agent = make_agent(volume, rclone_bucket)
        agent.checkpoints.mkdir()
        filler = volume / "filler"
        fill(filler)
        assert agent.start_refused() == 1
        error, hint = agent.log_text().splitlines()[-2:]
        assert error.startswith("error: ")
        assert "room" in hint or "space" in hint
        filler.unlink()
        with agent:
            agent.wait_committed(agent.announce(good_checkpoint(agent), 7).save)


def fill(path: Path) -> None:
    """Take all the room there is, to the last byte."""
    with path.open("wb", buffering=0) as file:
        for block_bytes in (MIB, 4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(block_bytes))


def test_a_second_agent_on_a_volume_is_refused_and_the_first_goes_on(
    agent: AgentProcess, rclone_bucket: Bucket
) -> None:
    second = make_agent(agent.volume, rclone_bucket)
    assert second.start_refused() == 1
    error, hint = second.log_text().splitlines()[-2:]
    assert error.startswith("error: ")
    assert hint.startswith("hint: another agent uses this volume")
    agent.wait_committed(agent.announce(good_checkpoint(agent), 7).save)


def overwrite(journal: Path) -> None:
    journal.write_bytes(b"no journal at all" * 1000)


def write_as_a_later_version(journal: Path) -> None:
    opened = SqliteJournal(journal, Reserve(journal.parent))
    records = [record.replace(b'"staged"', b'"staged-anew"') for record in opened.replay()]
    opened.drop(range(len(records)))
    opened.append(records)
    opened.close()


@pytest.mark.parametrize(
    ("spoil", "event"), [(overwrite, "journal.damaged"), (write_as_a_later_version, "journal.unreadable")]
)
def test_an_unreadable_journal_is_moved_aside_and_the_announced_checkpoint_commits(
    tmp_path: Path, rclone_bucket: Bucket, fault_proxy: FaultProxy, spoil: Callable[[Path], None], event: str
) -> None:
    fault_proxy.outage(True)
    with make_agent(tmp_path / "volume", rclone_bucket, endpoint_url=fault_proxy.endpoint_url) as agent:
        directory = good_checkpoint(agent)
        original = tree(directory)
        save = agent.announce(directory, 7).save
        agent.kill()
        # The trainer may rotate what was announced.
        shutil.rmtree(directory)
        journal = agent.volume / STATE_DIRECTORY / AGENT_STATE_DIRECTORY / JOURNAL
        spoil(journal)
        fault_proxy.outage(False)
        agent.start()
        assert agent.log(event)
        assert [path.name for path in journal.parent.glob("*.damaged-1")] == [f"{JOURNAL}.damaged-1"]
        agent.wait_committed(save)
    assert tree(BucketView(rclone_bucket).restore(tmp_path / "other")) == original
