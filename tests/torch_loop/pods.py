"""Pods of one job, each with a volume, an agent and one rank: started, replaced, killed in place, stopped."""

import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Self

from tests.harness.agent_process import AgentProcess, wait_until
from tests.harness.bounds import HANG_SECONDS
from tests.harness.warm_python import TRAINER_ENVIRONMENT, WarmProcess, warm_torchrun
from tests.servers.fault_proxy import FaultProxy
from tests.servers.process import free_port

from keepstep_api import names

PROGRAM: Final = Path(__file__).with_name("sharded.py")
_LIBRARIES: Final = ("torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp")


class Pod:
    """One of them. Its volume stays until `replace`."""

    def __init__(self, folder: Path, number: int, destination: str, program: Path, settings: Mapping[str, Any]) -> None:
        self._program = program
        self._restore = settings["restore"]
        self.volume = folder / f"pod-{number}"
        # The server does not look at it. So requests say whose they are.
        self.token = f"pod-{number}"
        environment = {"AWS_SESSION_TOKEN": self.token}
        self.agent = AgentProcess(self.volume, destination, environment=environment, watch="off", **settings)
        self._output = folder / f"pod-{number}.output"
        self._trainer: WarmProcess | None = None

    def start_trainer(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        there = {**os.environ, **TRAINER_ENVIRONMENT, **environment, names.ENV_VOLUME: str(self.volume)}
        there[names.ENV_RESTORE] = self._restore
        there[names.ENV_CHECKPOINT_DIRECTORY] = str(self.agent.checkpoints)
        with Path(os.devnull).open("rb") as nothing, self._output.open("wb") as output:
            files = [nothing.fileno(), output.fileno(), output.fileno()]
            self._trainer = warm_torchrun(*_LIBRARIES).start(
                [str(self._program), *words], environment=there, files=files
            )

    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def says(self, word: str) -> list[str]:
        """What the lines that begin with `word` say after it."""
        return [line.removeprefix(word).strip() for line in self.output().splitlines() if line.startswith(word)]

    def wait_trainer(self) -> int:
        assert self._trainer is not None
        return self._trainer.wait(HANG_SECONDS)

    def kill_trainer(self) -> None:
        """Kill it, as containers are when they are restarted in place."""
        if self._trainer is not None:
            self._trainer.kill()
            self._trainer.wait(HANG_SECONDS)

    def end_trainer(self) -> None:
        """Tell it to end, as kubelet does, and wait until it has."""
        assert self._trainer is not None
        self._trainer.send_signal(signal.SIGTERM)
        self.wait_trainer()

    def replace(self) -> None:
        """Lose the pod and its volume; a new one takes its place."""
        self.kill_trainer()
        self.agent.kill()
        shutil.rmtree(self.volume)
        self.agent.start()


class Pods:
    """A job of `count` pods behind a proxy that counts what they read. A context manager.

    With another `restore` than lazy, whoever uses it restores the volumes before.
    """

    def __init__(
        self,
        folder: Path,
        count: int,
        destination: str,
        proxy: FaultProxy,
        *,
        program: Path = PROGRAM,
        **settings: Any,
    ) -> None:
        self.proxy = proxy
        roomy = {"endpoint_url": proxy.endpoint_url, "part_size_bytes": "5MiB", "restore": names.LAZY, **settings}
        self.pods = [Pod(folder, number, destination, program, roomy) for number in range(count)]
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        for pod in self.pods:
            self._stack.enter_context(pod.agent)
            self._stack.callback(pod.kill_trainer)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, *words: object) -> None:
        """Start one rank in every pod."""
        environment = {
            "WORLD_SIZE": str(len(self.pods)),
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        for rank, pod in enumerate(self.pods):
            pod.start_trainer(list(map(str, words)), {**environment, "RANK": str(rank)})

    def train(self, *words: object) -> list[str]:
        """Start, wait for the end and for the commit; return what all of them resumed from, and the digests."""
        self.start(*words)
        return self.finish()

    def finish(self) -> list[str]:
        codes = [pod.wait_trainer() for pod in self.pods]
        assert codes == [0] * len(self.pods), "\n".join(pod.output() for pod in self.pods)
        saved = [one.step for one in self.pods[0].agent.status().checkpoints]
        for pod in self.pods if saved else ():
            step = max(saved)
            wait_until(lambda pod=pod, step=step: _committed(pod) == step, HANG_SECONDS, f"step {step} is committed")  # type: ignore[misc]
        return [word for pod in self.pods for word in pod.says("resumed")]

    def read_bytes(self, pod: Pod | None = None) -> int:
        """How many bytes of files all pods, or this one, have asked the store for since the log was cleared."""
        return sum(
            _range_bytes(request.headers["range"])
            for request in self.proxy.log
            if "range" in request.headers and (pod is None or pod.token == request.headers["x-amz-security-token"])
        )

    def stored_bytes(self) -> int:
        return sum(pod.agent.status().newest_committed.size_bytes for pod in self.pods)


def _committed(pod: Pod) -> int:
    status = pod.agent.status()
    return status.newest_committed.step if status.HasField("newest_committed") else -1


def _range_bytes(header: str) -> int:
    first, _, last = header.removeprefix("bytes=").partition("-")
    return int(last) - int(first) + 1
