"""How many calls of each method are open at once, against a real gRPC server on a socket."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from tests.harness.bounds import HANG_SECONDS

from keepstep_agent.runtime.api.call_limits import _MOST_OPEN, CallsLimited
from keepstep_agent.runtime.api.errors import ErrorsAnswered
from keepstep_api.v1 import agent_pb2, agent_pb2_grpc

_MOST = 3
_WATCH = agent_pb2.WatchStatusRequest()


class _Service(agent_pb2_grpc.AgentServicer):
    async def WatchStatus(self, request: object, context: object) -> AsyncIterator[agent_pb2.Status]:  # noqa: N802
        yield agent_pb2.Status(agent_version="watched")
        await asyncio.Event().wait()

    async def GetStatus(self, request: object, context: object) -> agent_pb2.Status:  # noqa: N802
        return agent_pb2.Status(agent_version="asked")


@asynccontextmanager
async def serving(folder: Path, **options: float) -> AsyncIterator[grpc.aio.Channel]:
    limits = CallsLimited(dict.fromkeys(_MOST_OPEN, _MOST), **options)
    server = grpc.aio.server(interceptors=[limits, ErrorsAnswered()])
    agent_pb2_grpc.add_AgentServicer_to_server(_Service(), server)
    health_service = health.aio.HealthServicer()
    await health_service.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    server.add_insecure_port(f"unix:{folder}/socket")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"unix:{folder}/socket") as channel:
            yield channel
    finally:
        await server.stop(None)


async def test_a_call_beyond_the_limit_is_refused_and_other_methods_are_served(tmp_path: Path) -> None:
    async with serving(tmp_path) as channel:
        stub = agent_pb2_grpc.AgentStub(channel)
        streams = [stub.WatchStatus(_WATCH, timeout=HANG_SECONDS) for _ in range(_MOST)]
        for stream in streams:
            assert (await stream.read()).agent_version == "watched"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.WatchStatus(_WATCH, timeout=HANG_SECONDS).read()
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "WatchStatus: 3 calls are open" in str(refused.value.details())
        assert (await stub.GetStatus(agent_pb2.GetStatusRequest(), timeout=HANG_SECONDS)).agent_version == "asked"


async def test_a_call_that_ends_makes_room_for_another(tmp_path: Path) -> None:
    async with serving(tmp_path) as channel:
        stub = agent_pb2_grpc.AgentStub(channel)

        async def is_refused() -> bool:
            stream = stub.WatchStatus(_WATCH, timeout=HANG_SECONDS)
            try:
                await stream.read()
            except grpc.aio.AioRpcError as error:
                return error.code() is grpc.StatusCode.UNAVAILABLE
            stream.cancel()
            return False

        for _ in range(3 * _MOST):
            async with asyncio.timeout(HANG_SECONDS):
                # The server may not have noticed yet that another one was cancelled.
                while await is_refused():
                    pass


async def test_calls_that_bring_no_request_end_and_others_are_answered_meanwhile(tmp_path: Path) -> None:
    async with serving(tmp_path, receive_seconds=0.2) as channel:
        open_call: Any = channel.stream_stream("/keepstep.v1.Agent/WatchStatus", request_serializer=bytes)
        silent = [open_call(timeout=HANG_SECONDS) for _ in range(_MOST)]
        stub = agent_pb2_grpc.AgentStub(channel)
        assert (await stub.GetStatus(agent_pb2.GetStatusRequest(), timeout=HANG_SECONDS)).agent_version == "asked"
        for one in silent:
            assert await asyncio.wait_for(one.code(), HANG_SECONDS) is grpc.StatusCode.INVALID_ARGUMENT
            assert "did not arrive within 0.2 s" in await one.details()
        assert (await stub.WatchStatus(_WATCH, timeout=HANG_SECONDS).read()).agent_version == "watched"


async def test_a_call_that_ends_without_a_request_is_told_so(tmp_path: Path) -> None:
    async with serving(tmp_path) as channel:
        open_call: Any = channel.stream_unary("/keepstep.v1.Agent/GetStatus", request_serializer=bytes)()
        await open_call.done_writing()
        assert await asyncio.wait_for(open_call.code(), HANG_SECONDS) is grpc.StatusCode.INVALID_ARGUMENT


async def test_streams_of_health_are_counted_too(tmp_path: Path) -> None:
    async with serving(tmp_path) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest()
        streams = [stub.Watch(request, timeout=HANG_SECONDS) for _ in range(_MOST)]
        for stream in streams:
            assert (await stream.read()).status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Check(request, timeout=HANG_SECONDS)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
