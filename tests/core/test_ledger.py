"""The format of a ledger's objects: what is tolerated, what is refused, and that a merge loses nothing."""

import json
from dataclasses import replace
from typing import Any
from zlib import crc32

import pytest
from tests.core.noted_lives import NotedLife, killed_and_resumed

from keepstep_agent.core.limits import LEDGER_BYTES, LEDGER_LIVES
from keepstep_agent.core.stored.checked_json import UndecodableError
from keepstep_agent.core.stored.ledger import (
    ENTRY_TAGS,
    Alive,
    LedgerEntry,
    SaveLost,
    WorkSetAside,
    decode_lives,
    encode_life,
    joined_lives,
    merged,
)
from keepstep_agent.core.stored.object_layout import ledger_key, parse_ledger_key


def every_kind() -> NotedLife:
    life = NotedLife("0a1b2c3d", place="worker-3")
    life.resumes(10.5, 7, restore=(1.0, 9.0))
    life.ranks(11, 8)
    life.save(20, 21, 8, units={"tokens": 4096.0}, stall_seconds=0.5)
    life.commit(25, 8)
    life.add(SaveLost, 26, save="save-9", outcome="shed", reason="a newer one is committed")
    life.add(WorkSetAside, 27, work="checkpoint-9", doing="put-file", deaths=2, save="save-9")
    life.notice(30)
    life.add(Alive, 31, ranks=8, step=8)
    life.end(40)
    return life


def changed(body: bytes, change: Any) -> bytes:
    """The same object after a change of its content, with a checksum that is right again."""
    value = json.loads(body)
    del value["crc32"]
    change(value)
    content = json.dumps(value, separators=(",", ":")).encode().removesuffix(b"}")
    return content + b',"crc32":"%08x"}\n' % crc32(content)


def test_every_kind_of_entry_is_read_as_it_was_written() -> None:
    life = every_kind().life
    assert {type(entry) for entry in life.entries} == set(ENTRY_TAGS)
    assert decode_lives(encode_life(life)) == (life,)


def test_what_a_newer_version_adds_is_left_out() -> None:
    life = every_kind().life

    def add(value: Any) -> None:
        value["format"], value["invented"] = 9, [1]
        value["lives"][0]["invented"] = {"a": 1}
        value["lives"][0]["entries"][0]["invented"] = 1
        value["lives"][0]["entries"].append({"kind": "invented", "number": 99, "at": "noon"})

    assert decode_lives(changed(encode_life(life), add)) == (life,)


@pytest.mark.parametrize(
    ("field", "value"),
    [("at", -1), ("at", 1e300), ("at", "noon"), ("number", -1), ("number", 2**70), ("kind", 7), ("start", "x" * 200)],
)
def test_an_entry_that_no_agent_writes_is_refused(field: str, value: Any) -> None:
    body = changed(encode_life(every_kind().life), lambda whole: whole["lives"][0]["entries"][0].update({field: value}))
    with pytest.raises(UndecodableError):
        decode_lives(body)
    assert merged([body]) is None


@pytest.mark.parametrize("position", [0, 30, 200, -3])
def test_a_flipped_byte_is_noticed(position: int) -> None:
    body = bytearray(encode_life(every_kind().life))
    body[position] ^= 1
    with pytest.raises(UndecodableError):
        decode_lives(bytes(body))


def test_an_object_that_is_cut_off_or_too_large_is_refused() -> None:
    body = encode_life(every_kind().life)
    for damaged in (b"", body[:-1], body[: len(body) // 2], body + b" " * LEDGER_BYTES, b"[" * 100_000):
        with pytest.raises(UndecodableError):
            decode_lives(damaged)


def test_a_merge_holds_everything_but_the_older_signs_of_life() -> None:
    lives = [life.life for life in killed_and_resumed()]
    alive: list[LedgerEntry] = [Alive(number=90 + at, at=2000.0 + at, ranks=1) for at in range(3)]
    pieces = [replace(life, entries=(entry,)) for life in lives for entry in life.entries]
    pieces += [replace(lives[0], entries=(entry,)) for entry in alive]
    whole = merged([encode_life(piece) for piece in [*pieces, *pieces]])
    assert whole is not None
    assert decode_lives(whole) == (replace(lives[0], entries=(*lives[0].entries, alive[-1])), lives[1])
    assert joined_lives([*decode_lives(whole), *lives]) == decode_lives(whole)


def test_a_merge_keeps_what_only_a_newer_version_knows_and_leaves_newer_formats_alone() -> None:
    body = encode_life(every_kind().life)
    added = changed(body, lambda value: value["lives"][0]["entries"].append({"kind": "new", "number": 99, "more": 1}))
    whole = merged([body, added])
    assert whole is not None
    assert json.loads(whole)["lives"][0]["entries"][-1] == {"kind": "new", "number": 99, "more": 1}
    assert merged([body, changed(body, lambda value: value.update(format=2))]) is None


def test_a_merge_that_could_not_be_read_again_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = []
    for number in range(LEDGER_LIVES + 1):
        life = NotedLife(f"agent-{number}")
        life.ranks(10, 1)
        bodies.append(encode_life(life.life))
    assert merged(bodies) is None
    whole = merged(bodies[:-1])
    assert whole is not None
    assert len(decode_lives(whole)) == LEDGER_LIVES
    assert len(whole) < LEDGER_BYTES / 2
    monkeypatch.setattr("keepstep_agent.core.stored.ledger.LEDGER_BYTES", len(whole) - 1)
    assert merged(bodies[:-1]) is None


def test_keys_of_the_ledger_are_told_from_all_others() -> None:
    key = ledger_key("job-1", 1_700_000_000.1234, "0a1b2c3d.1")
    assert key == ".keepstep/ledger/job-1/1700000000123-0a1b2c3d.1.json"
    assert parse_ledger_key(key) == ("job-1", 1_700_000_000_123)
    assert parse_ledger_key(ledger_key("", 1.0, "a")) == ("none", 1000)
    for other in (".keepstep/commits/1.json", ".keepstep/ledger/x.json", ".keepstep/ledger/a/b/1700000000123-a.json"):
        assert parse_ledger_key(other) is None
