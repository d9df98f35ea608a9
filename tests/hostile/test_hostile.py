"""A short round of `make hostile`, and whether its generators find what they are there for."""

import json
import random
from pathlib import Path
from zlib import crc32

import msgspec
import pytest
from google.protobuf.message import Message
from tests.hostile import requests
from tests.hostile.__main__ import attack_agent, attack_objects, attack_starts
from tests.hostile.mutations import mutated_object

from keepstep_agent.core.errors import RequestError
from keepstep_agent.core.limits import REQUEST_NUMBERS, REQUEST_TEXTS
from keepstep_agent.core.policies.restore_choice import Pin, encode_pin
from keepstep_agent.core.stored import checked_json
from keepstep_agent.runtime.api.errors import check_request

# It ends a start that hangs, and judges no machine: rounds are bounded one by one, by the processor's time.
pytestmark = pytest.mark.timeout(900)


def test_no_hostile_object_ends_in_a_traceback_and_damage_leads_to_the_next_older(tmp_path: Path) -> None:
    attack_objects(tmp_path, rounds=15, seed=1)


def test_no_hostile_journal_or_descriptor_ends_a_start_or_hides_what_is_sound(tmp_path: Path) -> None:
    attack_starts(tmp_path, rounds=10, seed=1)


def test_no_hostile_request_ends_or_hangs_an_agent(tmp_path: Path) -> None:
    attack_agent(tmp_path, count=400, seed=1)


def test_every_request_of_the_api_is_made_and_every_field_is_beyond_its_limit_at_times() -> None:
    generator = random.Random(1)
    beyond: set[str] = set()
    for method in requests._METHODS.methods:
        for _ in range(150):
            request = requests.hostile_request(method, ["/a"], generator)
            assert isinstance(request, Message)
            for one in (request, *getattr(request, "ranges", ()), *getattr(request, "units", ())):
                beyond |= _fields_beyond(one)
    assert beyond >= REQUEST_NUMBERS.keys() | REQUEST_TEXTS.keys()


def _fields_beyond(request: Message) -> set[str]:
    beyond: set[str] = set()
    for one, _ in request.ListFields():
        alone = type(request)()
        alone.MergeFrom(request)
        for other, _ in request.ListFields():
            if other is not one:
                alone.ClearField(other.name)
        try:
            check_request(alone)
        except RequestError:
            beyond.add(one.name)
    return beyond


def test_half_of_the_objects_have_the_checksum_that_their_form_wants() -> None:
    body = encode_pin(Pin(attempt="job-1", markers=(".keepstep/commits/999999999992.save.json",)))
    generator = random.Random(1)
    sealed = 0
    for _ in range(400):
        content, _, end = mutated_object(body, generator).rpartition(b',"crc32":"')
        sealed += end == b'%08x"}\n' % crc32(content) and content + b"}" != json.dumps(json.loads(body)).encode()
    assert 100 < sealed < 300


def test_a_decoder_that_lets_one_thing_through_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(body: bytes, as_type: type[object], *, limit_bytes: int) -> object:
        return msgspec.json.decode(body.partition(b',"crc32"')[0] + b"}", type=as_type)

    monkeypatch.setattr(checked_json, "decode", careless)
    with pytest.raises((ValueError, RecursionError)):
        attack_objects(tmp_path, rounds=100, seed=1)
