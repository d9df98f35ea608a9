"""One table of limits, which leaves out nothing that may come from outside."""

from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from keepstep_agent.core.errors import ErrorKind, RequestError
from keepstep_agent.core.injection.annotation_table import settings_annotations
from keepstep_agent.core.injection.annotations import read_annotations
from keepstep_agent.core.injection.spec import InjectionDefaults, Refusal
from keepstep_agent.core.limits import (
    REQUEST_LISTS,
    REQUEST_MESSAGES,
    REQUEST_NUMBERS,
    REQUEST_TEXTS,
    SETTING_NUMBERS,
    SETTING_UNITS,
    largest_setting,
)
from keepstep_agent.core.settings.table import RawSetting, SettingField, read_values, setting_fields
from keepstep_agent.core.settings.values import Duration, Share
from keepstep_agent.runtime.api.errors import check_request
from keepstep_api.names import ANNOTATION_INJECT, ANNOTATION_PREFIX
from keepstep_api.v1 import agent_pb2

REQUESTS = [method.input_type for method in agent_pb2.DESCRIPTOR.services_by_name["Agent"].methods]
PARTS: list[Any] = [agent_pb2.Unit.DESCRIPTOR, agent_pb2.FileRange.DESCRIPTOR]
"""Messages within requests."""
NUMBERS = [setting for setting in setting_fields() if setting.value_type in (int, float, Duration, Share)]


def bounded_fields() -> list[FieldDescriptor]:
    unbounded = (FieldDescriptor.CPPTYPE_BOOL, FieldDescriptor.CPPTYPE_ENUM, FieldDescriptor.CPPTYPE_MESSAGE)
    return [field for message in (*REQUESTS, *PARTS) for field in message.fields if field.cpp_type not in unbounded]


def request_with(field: FieldDescriptor, value: object) -> Message:
    assert field.containing_type is not None
    return GetMessageClass(field.containing_type)(**{field.name: [value] if field.is_repeated else value})


@pytest.mark.parametrize("field", bounded_fields(), ids=lambda field: field.full_name)
def test_every_field_of_every_request_takes_its_limit_and_nothing_more(field: FieldDescriptor) -> None:
    is_text = field.cpp_type == FieldDescriptor.CPPTYPE_STRING
    most = (REQUEST_TEXTS if is_text else REQUEST_NUMBERS)[field.name]
    check_request(request_with(field, "a" * most if is_text else most))
    with pytest.raises(RequestError) as refused:
        check_request(request_with(field, "a" * (most + 1) if is_text else most + 1))
    assert refused.value.kind is ErrorKind.BAD_REQUEST
    assert field.name in str(refused.value)
    assert f"{most:,}" in refused.value.hint


def test_a_request_has_only_so_many_messages_and_each_is_checked() -> None:
    most = REQUEST_MESSAGES["ranges"]
    check_request(agent_pb2.FetchRequest(ranges=[agent_pb2.FileRange(path="a")] * most))
    for beyond in ([agent_pb2.FileRange(path="a")] * (most + 1), [agent_pb2.FileRange(offset_bytes=2**63)]):
        with pytest.raises(RequestError):
            check_request(agent_pb2.FetchRequest(ranges=beyond))
    described = [field for message in REQUESTS for field in message.fields]
    messages = {field.name: field.message_type for field in described if field.message_type is not None}
    assert messages.keys() == REQUEST_MESSAGES.keys()
    assert list(messages.values()) == PARTS


def test_a_request_has_only_so_many_texts() -> None:
    lists = [field for field in bounded_fields() if field.is_repeated]
    assert {field.name for field in lists} == REQUEST_LISTS.keys()
    for field in lists:
        assert field.containing_type is not None
        request = GetMessageClass(field.containing_type)
        most = REQUEST_LISTS[field.name]
        check_request(request(**{field.name: ["a"] * most}))
        with pytest.raises(RequestError, match=field.name) as refused:
            check_request(request(**{field.name: ["a"] * (most + 1)}))
        assert f"{most:,}" in refused.value.hint


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 1e300])
def test_a_number_of_a_request_that_is_none_is_refused(value: float) -> None:
    with pytest.raises(RequestError):
        check_request(agent_pb2.NotifyTerminationRequest(grace_seconds=value))


@pytest.mark.parametrize("setting", NUMBERS, ids=lambda setting: setting.key)
def test_every_setting_that_is_a_number_has_a_limit(setting: SettingField) -> None:
    most = largest_setting(setting.name)
    for text in (str(most + 1), "9" * 20, "9" * 400):
        values, problems = read_values([RawSetting(setting=setting, origin="here", raw=text)])
        assert not values
        assert len(problems) == 1
    values, problems = read_values([RawSetting(setting=setting, origin="here", raw=str(most))])
    assert values == {setting.key: most}
    assert not problems


@pytest.mark.parametrize("text", [str(10**20), "1025", "-1", "1e5", "9" * 4000])
def test_the_webhook_refuses_a_number_that_the_agent_would_refuse(text: str) -> None:
    annotations = {
        ANNOTATION_INJECT: "true",
        f"{ANNOTATION_PREFIX}destination": "s3://bucket/run",
        f"{ANNOTATION_PREFIX}max-concurrency": text,
    }
    answer = read_annotations(annotations, InjectionDefaults(image="agent"))
    assert isinstance(answer, Refusal)
    assert len(answer.problems) == 1
    assert answer.problems[0].startswith(f"{ANNOTATION_PREFIX}max-concurrency: ")


def test_no_limit_is_of_something_that_is_gone() -> None:
    assert {field.name for field in bounded_fields()} == REQUEST_NUMBERS.keys() | REQUEST_TEXTS.keys()
    names = {setting.name for setting in NUMBERS}
    assert names >= SETTING_NUMBERS.keys()
    for unit in SETTING_UNITS:
        assert any(name.endswith(unit) for name in names)
    assert f"{ANNOTATION_PREFIX}max-concurrency" in settings_annotations()
