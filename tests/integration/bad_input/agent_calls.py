"""An agent, a sound checkpoint for it, and what a call that it refuses says."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from tests.harness.agent_process import AgentProcess, write_checkpoint
from tests.servers.server import Bucket

from keepstep_api.names import ERROR_DOMAIN

MIB = 1024 * 1024
SIZES = {"model.safetensors": 300_000, "config.json": 200}


def make_agent(volume: Path, bucket: Bucket, **settings: Any) -> AgentProcess:
    return AgentProcess(volume, bucket.destination, **{"endpoint_url": bucket.endpoint_url, "watch": "off", **settings})


def good_checkpoint(agent: AgentProcess, step: int = 7) -> Path:
    return write_checkpoint(agent.checkpoints / f"checkpoint-{step}", SIZES, seed=step)


def refusal(call: Callable[[], object]) -> tuple[str, str, str]:
    """gRPC code, reason and hint of a call that must fail, as any client can decode them."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error: Any = caught.value
    status = rpc_status.from_call(error)
    assert status is not None, f"no google.rpc.Status: {error}"
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert info.domain == ERROR_DOMAIN
    assert info.metadata["hint"] in error.details()
    return error.code().name, info.reason, info.metadata["hint"]
