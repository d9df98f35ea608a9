"""Records and staged descriptors of a trainer beyond every limit: the agent answers and stores what is good."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.harness.agent_process import AgentProcess, wait_until, write_checkpoint
from tests.harness.bounds import HANG_SECONDS

from keepstep_agent.core.agent.events import Announced
from keepstep_agent.core.limits import LOCAL_RANKS, WORLD_SIZE
from keepstep_agent.runtime.engine.event_codec import decode_event, encode_event
from keepstep_api.records import record_file


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    (tmp_path / "bucket").mkdir()
    with AgentProcess(tmp_path / "volume", f"file://{tmp_path}/bucket", watch="off", warm=False) as agent:
        yield agent


def write_record(agent: AgentProcess, name: str, directory: str = "", **members: object) -> None:
    """A checkpoint that is whole, and its record as the client writes it, apart from `directory` and `members`."""
    write_checkpoint(agent.checkpoints / name, {"model.bin": 5000})
    record = {
        "format": 1,
        "name": name,
        "step": 1,
        "save": f"save-of-{name}",
        "kind": "periodic",
        "world_size": 1,
        "saved_at": 1.0,
        "files": [{"path": "model.bin", "size": 5000}],
        "directory": directory,
        **members,
    }
    folder = agent.volume / ".keepstep" / "records"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / record_file(directory, name)).write_text(json.dumps(record))


def test_records_beyond_all_limits_hang_no_agent_and_hide_no_checkpoint(agent: AgentProcess) -> None:
    agent.kill()
    write_record(agent, "ranks", ranks=[200_000] * 6_000_000)
    write_record(agent, "few-ranks", ranks=[WORLD_SIZE - 1] * (LOCAL_RANKS + 1), world_size=WORLD_SIZE)
    write_record(agent, "world", ranks=[0], world_size=10**20)
    write_record(agent, "save", save="../../../x")
    write_record(agent, "step", step=-5)
    write_record(agent, "deep", save=[])
    write_record(agent, "outside", directory="../../..")
    (agent.volume / ".keepstep" / "records" / "nested.json").write_text("[" * 1_000_000)
    # Of all of them it is the last to be announced.
    write_record(agent, "good", saved_at=2.0)
    agent.start()
    wait_until(
        lambda: agent.status().newest_committed.save == "save-of-good", HANG_SECONDS, "the good one is committed"
    )
    assert "Traceback" not in agent.log_text()
    assert len({line["record"] for line in agent.log("unannounced.record_unreadable")}) == 7
    assert not agent.log("unannounced.refused")
    assert agent.memory_bytes("VmHWM") < 200 * 1024**2


def forge_descriptor(agent: AgentProcess, save: str, announced: str, files: list[tuple[str, int]]) -> None:
    """What lies beside the pins of a save that never was; the record in it has the checksum that a record has."""
    staged = agent.volume / ".keepstep" / "staged"
    event = decode_event(announced.encode())
    assert isinstance(event, Announced)
    record = encode_event(replace(event, info=replace(event.info, save=save))).decode()
    (staged / save / "rank-00000").mkdir(parents=True)
    descriptor = {"announcements": [record], "part_size_bytes": 1, "pack_size_bytes": 0}
    columns: dict[str, object] = {"folder": f".keepstep/staged/{save}/rank-00000", "announced": ""}
    columns |= {name: [1] * len(files) for name in ("mtimes_ns", "inodes", "private", "changed_ns")}
    columns |= {"paths": [path for path, _ in files], "sizes_bytes": [size_bytes for _, size_bytes in files]}
    value = {"format": 1, "descriptor": descriptor, "files": columns}
    (staged / save / "rank-00000.json").write_text(json.dumps(value))


def test_descriptors_beyond_all_limits_hang_no_agent_and_hide_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    destination = f"file://{tmp_path}/bucket"
    with AgentProcess(tmp_path / "volume", destination, watch="off", bandwidth_bytes_per_second=10) as slow:
        # The first file goes out at once, and the second one waits for minutes until it is paid for.
        files = {"model.bin": 5000, "second.bin": 5000}
        save = slow.announce(write_checkpoint(slow.checkpoints / "checkpoint-1", files), 1).save
        slow.kill()
        staged = slow.volume / ".keepstep" / "staged"
        value = json.loads((staged / save / "rank-00000.json").read_text())
        (record,) = value["descriptor"]["announcements"]
        forge_descriptor(slow, "huge", record, [(f"{number:03d}", 2**62) for number in range(300)])
        forge_descriptor(slow, "large", record, [(f"{number:03d}", 2**41) for number in range(300)])
        forge_descriptor(slow, "many", record, [(f"{number:06d}", 1) for number in range(800_000)])
        forge_descriptor(slow, "other", record, [])
        (staged / "other" / "rank-00000.json").write_text(json.dumps({**value, "descriptor": [[]] * 3_000_000}))
        for journal in (slow.volume / ".keepstep").rglob("journal.sqlite3*"):
            journal.unlink()
    with AgentProcess(tmp_path / "volume", destination, watch="off", warm=False) as agent:
        wait_until(lambda: agent.status().newest_committed.save == save, HANG_SECONDS, "the good one is committed")
        assert "Traceback" not in agent.log_text()
        assert len(agent.log("staging.descriptor_unreadable")) == 4
        assert agent.memory_bytes("VmHWM") < 200 * 1024**2
