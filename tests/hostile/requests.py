"""Hostile requests to a real agent, built from the API's own description: every method, every field, any value.

Many calls are open at once and each has a deadline, so that those which wait for what never comes end. Invariants: an
agent answers with a status of its own words, never INTERNAL, and answers GetStatus in the midst of every batch, to
another program in the pod: on a connection of its own, because calls of one connection wait for each other's bytes.
"""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc
import psutil
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from tests.harness.agent_process import AgentProcess
from tests.harness.bounds import HANG_SECONDS
from tests.hostile.mutations import TEXTS

from keepstep_api.names import socket_address
from keepstep_api.v1 import agent_pb2

_BATCH: Final = 250
_CALL_SECONDS: Final = 30.0
"""A call that waits for a commit or for its other ranks ends by it."""
WORK_SECONDS: Final = 2.0
"""Of the agent's processor, from a GetStatus to its answer: no other process takes part in it."""
_OPTIONS: Final = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
_NUMBERS: Final = (0, 1, 2, 3, 1023, 1024, 99_999, 100_000, 10**12, 2**31, 2**32 - 1, 2**53, 2**63, 2**64 - 1)
_METHODS: Final = agent_pb2.DESCRIPTOR.services_by_name["Agent"]


@dataclass(slots=True)
class Answers:
    """How many calls ended in which status."""

    requests: int = 0
    longest_work_seconds: float = 0.0
    codes: Counter[str] = field(default_factory=Counter)


def hostile_request(method: MethodDescriptor, paths: list[str], generator: random.Random) -> Message:
    """Some of the fields, each with a value at, near or far beyond what makes sense."""
    return _hostile_message(method.input_type, paths, generator)


def _hostile_message(described: Descriptor, paths: list[str], generator: random.Random) -> Message:
    request = GetMessageClass(described)()
    for one in described.fields:
        if generator.random() < 0.6:
            value = [_value(one, paths, generator) for _ in range(generator.choice([1, 1, 2, 500]))]
            if one.is_repeated:
                getattr(request, one.name).extend(value)
            else:
                setattr(request, one.name, value[0])
    return request


def _value(one: FieldDescriptor, paths: list[str], generator: random.Random) -> Any:
    if one.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        # What ends the agent as it is asked to is no attack.
        return one.name != "trainers_gone" and generator.random() < 0.5
    if one.message_type is not None:
        return _hostile_message(one.message_type, paths, generator)
    if one.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        return generator.choice([0, 1, 2, 3, 4, 1000, 2**31 - 1, -1])
    if one.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE:
        return generator.choice([0.0, 1e9, -1.0, 1e308, float("inf"), float("-inf"), float("nan")])
    if one.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        # Few of those that are right, so that most of what is admitted is said again.
        right = paths if one.name == "path" else ["save-1", "attempt-1", "model.bin"]
        return generator.choice([*TEXTS, "x" * 70_000, *right, *right, *right])
    most = 2**32 - 1 if one.cpp_type == FieldDescriptor.CPPTYPE_UINT32 else 2**64 - 1
    return min(generator.choice(_NUMBERS), most)


def attack(agent: AgentProcess, paths: list[Path], *, requests: int, seed: int) -> Answers:
    answers = Answers()
    process = psutil.Process(agent.process.pid)
    generator = random.Random(seed)
    texts = [str(path) for path in paths] + ["/", str(agent.volume), f"{agent.volume}/.keepstep", "/proc/self/mem"]
    address = socket_address(agent.socket)
    with (
        grpc.insecure_channel(address, options=_OPTIONS) as channel,
        grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as other_channel,
    ):
        get_status = _call(other_channel, _METHODS.methods_by_name["GetStatus"])
        calls = {method.name: _call(channel, method) for method in _METHODS.methods}
        while answers.requests < requests:
            batch = min(_BATCH, requests - answers.requests)
            methods = [generator.choice(_METHODS.methods) for _ in range(batch)]
            pending = [calls[method.name](hostile_request(method, texts, generator)) for method in methods]
            before = process.cpu_times()
            get_status(agent_pb2.GetStatusRequest(), HANG_SECONDS).result()
            after = process.cpu_times()
            work_seconds = after.user + after.system - before.user - before.system
            assert work_seconds < WORK_SECONDS, f"seed {seed}, {answers}"
            answers.longest_work_seconds = max(answers.longest_work_seconds, work_seconds)
            for method, call in zip(methods, pending, strict=True):
                answers.codes[_code(call, method)] += 1
            answers.requests += batch
    return answers


def _call(channel: grpc.Channel, method: MethodDescriptor) -> Any:
    codecs: dict[str, Any] = {
        "request_serializer": GetMessageClass(method.input_type).SerializeToString,
        "response_deserializer": GetMessageClass(method.output_type).FromString,
    }
    path = f"/{_METHODS.full_name}/{method.name}"
    if method.server_streaming:
        stream = channel.unary_stream(path, **codecs)
        return lambda request, seconds=_CALL_SECONDS: stream(request, timeout=seconds)
    single = channel.unary_unary(path, **codecs)
    return lambda request, seconds=_CALL_SECONDS: single.future(request, timeout=seconds)


def _code(call: Any, method: MethodDescriptor) -> str:
    """The status a call ends with; of a stream, once it has said something."""
    try:
        if method.server_streaming:
            next(iter(call))
            call.cancel()
        else:
            call.result()
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


def lines_of_bugs(agent: AgentProcess) -> Iterator[str]:
    """What an agent's log must not have."""
    for line in agent.log_text().splitlines():
        if "Traceback" in line or "this is a bug" in line:
            yield line
