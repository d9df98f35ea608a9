"""What Keepstep writes, as it was written once and for all: an upgrade meets these files, a downgrade newer ones.

Each file in `frozen/` was written by the version that introduced its format, and never changes once that version is
released. When a format changes, add a file, and raise the format's number: an older version then says what it met.
"""

import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final
from zlib import crc32

import pytest
from structlog.testing import capture_logs

from keepstep.checkpoints.records import read_records, write_record
from keepstep_agent.adapters.records import unannounced
from keepstep_agent.adapters.volume.pinning import encode_descriptor, read_descriptor
from keepstep_agent.adapters.volume.shared_volume import open_volume
from keepstep_agent.core.agent.events import EVENT_TAGS, Announced
from keepstep_agent.core.errors import ErrorKind, StoreError
from keepstep_agent.core.mirror.base import decode_base, encode_base
from keepstep_agent.core.policies.restore_choice import decode_pin, encode_pin
from keepstep_agent.core.stored.draining import decode_draining, encode_draining
from keepstep_agent.core.stored.lease import decode_lease, encode_lease
from keepstep_agent.core.stored.ledger import decode_lives, encode_life
from keepstep_agent.core.stored.manifest import decode_manifest, decode_marker, encode_manifest, encode_marker
from keepstep_agent.core.stored.reservation import decode_reservation, encode_reservation
from keepstep_agent.core.stored.weights_marker import decode_weights_marker, encode_weights_marker
from keepstep_agent.runtime.engine.event_codec import UnknownRecordError, decode_event, encode_event, save_of_record
from keepstep_api import signal_file

FROZEN: Final = Path(__file__).parent / "frozen"
RECORD: Final = "checkpoint-7@762069bc07a6.json"
JOURNAL: Final = (FROZEN / "journal.jsonl").read_bytes().splitlines(keepends=True)

AGAIN: Final[dict[str, Callable[[bytes], bytes]]] = {
    "manifest.json": lambda body: encode_manifest(decode_manifest(body, "key")),
    "manifest-with-packs.json": lambda body: encode_manifest(decode_manifest(body, "key")),
    "manifest-of-a-snapshot.json": lambda body: encode_manifest(decode_manifest(body, "key")),
    "base.json": lambda body: encode_reservation(decode_reservation(body, "key")),
    "mirror.json": lambda body: b"".join(encode_base(decode_base(body))),
    "announced-snapshot.json": lambda body: encode_event(decode_event(body)),
    "marker.json": lambda body: encode_marker(decode_marker(body, "key")),
    "weights-marker.json": lambda body: encode_weights_marker(decode_weights_marker(body, "key")),
    "pin.json": lambda body: encode_pin(decode_pin(body, "key")),
    "lease.json": lambda body: encode_lease(decode_lease(body, "key")),
    "draining.json": lambda body: encode_draining(decode_draining(body, "key")),
    "ledger.json": lambda body: encode_life(*decode_lives(body)),
    "signal": lambda body: signal_file.encode(signal_file.decode(body)),
}


def newer(body: bytes) -> bytes:
    """The same, of a format that does not exist yet, with something in it that nobody knows."""
    content = re.sub(rb'"format":\d', b'"format":9,"invented":[1]', body.rpartition(b',"crc32"')[0])
    return content + b',"crc32":"%08x"}\n' % crc32(content)


@pytest.mark.parametrize("name", AGAIN)
def test_a_frozen_object_is_read_and_written_again_byte_by_byte(name: str) -> None:
    body = (FROZEN / name).read_bytes()
    assert AGAIN[name](body) == body


@pytest.mark.parametrize("record", JOURNAL, ids=[json.loads(line)["event"] for line in JOURNAL])
def test_a_frozen_journal_record_is_read_and_written_again_byte_by_byte(record: bytes) -> None:
    assert encode_event(decode_event(record)) == record


def test_every_event_of_the_journal_is_frozen() -> None:
    assert sorted(json.loads(line)["event"] for line in JOURNAL) == sorted(EVENT_TAGS.values())


def test_a_frozen_record_is_read_by_client_and_agent_and_written_again(tmp_path: Path) -> None:
    records = tmp_path / ".keepstep" / "records"
    records.mkdir(parents=True)
    body = (FROZEN / RECORD).read_bytes()
    (records / RECORD).write_bytes(body)
    (record,) = read_records(records)
    write_record(records, record)
    assert (records / RECORD).read_bytes() == body

    (tmp_path / "out" / "checkpoint-7" / "model").mkdir(parents=True)
    (tmp_path / "out" / "checkpoint-7" / "model" / "weights.pt").write_bytes(bytes(12))
    with capture_logs() as log:
        # An agent has it already, so there is nothing to take up; and nothing to complain of.
        assert (list(unannounced(tmp_path, tmp_path / "checkpoints", known=())), log) == ([], [])


def test_a_frozen_compressed_journal_record_is_read() -> None:
    body = (FROZEN / "large-record.zlib").read_bytes()
    assert decode_event(body) == decode_event(JOURNAL[0])
    assert save_of_record(body) == save_of_record(JOURNAL[0])


def test_a_frozen_staged_descriptor_is_read_and_written_again(tmp_path: Path) -> None:
    shutil.copy(FROZEN / "rank-00001.json", tmp_path)
    (tmp_path / "rank-00001" / "model").mkdir(parents=True)
    (tmp_path / "rank-00001" / "model" / "weights.pt").write_bytes(bytes(12))
    with open_volume(tmp_path) as root:
        descriptor, files = read_descriptor(root, "rank-00001")
    assert b"".join(encode_descriptor(descriptor, files)) == (FROZEN / "rank-00001.json").read_bytes()
    # Its announcement was written before some members of today's were known.
    announced = decode_event(descriptor.announcements[0].encode())
    assert isinstance(announced, Announced)
    assert (announced.files, announced.others, announced.units) == (("files",), (), ())


@pytest.mark.parametrize("name", ["manifest.json", "manifest-with-packs.json", "marker.json"])
def test_an_object_of_a_newer_version_is_no_damage_and_says_to_update(name: str) -> None:
    decode = decode_marker if name == "marker.json" else decode_manifest
    with pytest.raises(StoreError, match="it has format 9") as raised:
        decode(newer((FROZEN / name).read_bytes()), "key")
    assert raised.value.kind is ErrorKind.FORMAT_UNKNOWN
    assert "update Keepstep" in str(raised.value)


@pytest.mark.parametrize(("name", "decode"), [("lease.json", decode_lease), ("draining.json", decode_draining)])
def test_a_lease_or_a_notice_of_a_newer_version_is_never_taken_for_a_damaged_one(
    name: str, decode: Callable[[bytes, str], object]
) -> None:
    with pytest.raises(StoreError) as caught:
        decode(newer((FROZEN / name).read_bytes()), "key")
    assert caught.value.kind is ErrorKind.FORMAT_UNKNOWN


def test_a_pin_of_a_newer_version_is_refused_and_says_to_update() -> None:
    with pytest.raises(StoreError, match=r"it has format 9.*update Keepstep"):
        decode_pin(newer((FROZEN / "pin.json").read_bytes()), "key")


@pytest.mark.parametrize("record", JOURNAL, ids=[json.loads(line)["event"] for line in JOURNAL])
def test_a_journal_record_of_a_newer_version_is_refused(record: bytes) -> None:
    with pytest.raises(UnknownRecordError, match=r"it has format 9.*update Keepstep"):
        decode_event(newer(record))


def test_a_record_of_a_newer_version_is_skipped_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "keepstep")
    body = (FROZEN / RECORD).read_bytes().replace(b'"format": 1', b'"format": 2')
    (tmp_path / RECORD).write_bytes(body)
    assert list(read_records(tmp_path)) == []
    assert "it has format 2" in caplog.text


def test_a_signal_file_of_a_newer_version_asks_for_nothing() -> None:
    body = (FROZEN / "signal").read_bytes()
    assert signal_file.decode(body[:4] + (2).to_bytes(4, "little") + body[8:]) == signal_file.SaveSignal()
