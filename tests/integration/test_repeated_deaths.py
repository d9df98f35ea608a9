"""Work that kills the agent again and again is set aside; everything else goes on."""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.harness.agent_process import AgentProcess, wait_until, write_checkpoint
from tests.harness.bounds import HANG_SECONDS
from tests.harness.bucket_view import BucketView
from tests.servers.fault_proxy import FaultProxy
from tests.servers.faults import Fault, Rule
from tests.servers.server import Bucket

_SAVE = "fatal-save"


class _FatalSave:
    """A save during whose upload the agent is killed: the store does not answer, and the test is the kernel."""

    def __init__(self, proxy: FaultProxy) -> None:
        self._proxy = proxy
        self._deaths = 0
        proxy.add(Rule(name=_SAVE, fault=Fault.BLACKHOLE, method="PUT", target=_SAVE, times=-1))

    def kill(self, agent: AgentProcess) -> None:
        """Kill the agent once it sends a file of the save."""
        wait_until(lambda: self._proxy.hits(_SAVE) > self._deaths, HANG_SECONDS, "a file of the save is sent")
        agent.kill()
        self._deaths = self._proxy.hits(_SAVE)


@pytest.fixture
def fatal(fault_proxy: FaultProxy) -> _FatalSave:
    return _FatalSave(fault_proxy)


@pytest.fixture
def agent_of(rclone_bucket: Bucket, fault_proxy: FaultProxy, tmp_path: Path) -> Callable[..., AgentProcess]:
    def agent(**settings: Any) -> AgentProcess:
        return AgentProcess(
            tmp_path / "volume", rclone_bucket.destination, endpoint_url=fault_proxy.endpoint_url, **settings
        )

    return agent


def _is_hit_after(proxy: FaultProxy, hits: int) -> bool:
    return proxy.hits(_SAVE) > hits


def _announce(agent: AgentProcess, step: int, save: str) -> str:
    checkpoint = write_checkpoint(agent.checkpoints / f"checkpoint-{step}", {"model": 300_000}, seed=step)
    return agent.announce(checkpoint, step, save=save).save


def test_a_save_that_killed_two_agents_is_tried_last_and_all_else_is_stored(
    agent_of: Callable[..., AgentProcess], fatal: _FatalSave, rclone_bucket: Bucket
) -> None:
    with agent_of() as agent:
        _announce(agent, 1, _SAVE)
        fatal.kill(agent)
        agent.start(wait=False)
        fatal.kill(agent)
        agent.start()
        (aside,) = agent.log("work.set_aside")
        assert (aside["work"], aside["deaths"]) == (_SAVE, 2)
        assert "keepstep.dev/memory" in aside["hint"]
        # Tried again alone, it kills once more.
        fatal.kill(agent)
        agent.start()
        agent.wait_committed(_announce(agent, 2, "second"))
        agent.wait_committed(_announce(agent, 3, "third"))
        (line,) = agent.status().set_aside
        assert line.startswith("checkpoint-1 (step 1")
        assert "3 deaths" in line
        (reason,) = (one.reason for one in agent.status().checkpoints if one.save == _SAVE)
        assert "set aside" in reason
        agent.terminate()
        assert agent.wait(HANG_SECONDS) == 0, "a newer one is stored"
        assert "keepstep: not durable: checkpoint-1" in agent.log_text()
    assert len(BucketView(rclone_bucket).markers()) == 2


def test_if_the_newest_is_what_kills_the_exit_code_says_so(
    agent_of: Callable[..., AgentProcess], fatal: _FatalSave
) -> None:
    with agent_of() as agent:
        _announce(agent, 1, _SAVE)
        for _ in range(3):
            fatal.kill(agent)
            agent.start(wait=False)
        agent.wait_serving()
        agent.terminate()
        assert agent.wait(HANG_SECONDS) == 75
        (line,) = (line for line in agent.log_text().splitlines() if line.startswith("keepstep: not durable"))
        assert "set aside" in line
        assert "keepstep.dev/memory" in line


def test_what_is_tried_again_and_succeeds_is_no_suspect_any_more(
    agent_of: Callable[..., AgentProcess], fatal: _FatalSave, fault_proxy: FaultProxy
) -> None:
    with agent_of() as agent:
        _announce(agent, 1, _SAVE)
        fatal.kill(agent)
        agent.start(wait=False)
        fatal.kill(agent)
        fault_proxy.clear()
        agent.start()
        assert agent.log("work.set_aside")
        agent.wait_committed(_SAVE)
        assert not agent.status().set_aside


def test_a_checkpoint_that_killed_two_restores_gives_way_to_the_one_before(
    agent_of: Callable[..., AgentProcess], fault_proxy: FaultProxy, rclone_bucket: Bucket, tmp_path: Path
) -> None:
    with agent_of() as agent:
        agent.wait_committed(_announce(agent, 1, "first"))
        agent.wait_committed(_announce(agent, 2, _SAVE))
    volume = tmp_path / "new"
    options = [f"--volume={volume}", f"--endpoint-url={fault_proxy.endpoint_url}"]
    command = [sys.executable, "-m", "keepstep_agent", "restore", rclone_bucket.destination, *options]
    fault_proxy.add(Rule(name=_SAVE, fault=Fault.BLACKHOLE, method="GET", target=f"/{_SAVE}/model", times=-1))
    for _ in range(2):
        restore = subprocess.Popen(command)
        fetched = partial(_is_hit_after, fault_proxy, fault_proxy.hits(_SAVE))
        wait_until(fetched, HANG_SECONDS, "a file of the newest is fetched")
        restore.kill()
        restore.wait(HANG_SECONDS)
    said = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert said.returncode == 0, said.stderr
    assert (volume / "checkpoints" / "checkpoint-1" / "model").exists()
    assert not (volume / "checkpoints" / "checkpoint-2").exists()
    assert "keepstep.dev/memory" in said.stderr


def test_what_an_agent_fetches_before_it_is_asked_and_dies_of_is_not_fetched_again(
    agent_of: Callable[..., AgentProcess], fault_proxy: FaultProxy, rclone_bucket: Bucket, tmp_path: Path
) -> None:
    with agent_of() as agent:
        agent.wait_committed(_announce(agent, 1, _SAVE))
    fault_proxy.add(Rule(name=_SAVE, fault=Fault.BLACKHOLE, method="GET", target=f"/{_SAVE}/model", times=-1))
    with AgentProcess(
        tmp_path / "new", rclone_bucket.destination, endpoint_url=fault_proxy.endpoint_url, restore="lazy"
    ) as pod:
        hits = 0
        for _ in range(2):
            wait_until(partial(_is_hit_after, fault_proxy, hits), HANG_SECONDS, "a file is fetched")
            pod.kill()
            hits = fault_proxy.hits(_SAVE)
            pod.start()
        (aside,) = pod.log("work.set_aside")
        assert (aside["work"], aside["deaths"]) == (":guess", 2)
        pod.wait_committed(_announce(pod, 2, "second"))
        assert fault_proxy.hits(_SAVE) == hits
        assert pod.status().set_aside
