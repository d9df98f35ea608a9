"""One real container of the image: start it as some user, signal it, read what it said. Ended with the context."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

from tests.containers.engine import Engine
from tests.containers.image import IMAGE
from tests.harness.agent_process import json_lines
from tests.harness.bounds import HANG_SECONDS
from tests.servers.process import wait_until

# As Kubernetes gives to a restricted pod; the limits are those that runc may set inside another container.
_RESTRICTED: Final = ("--read-only", "--read-only-tmpfs=false", "--cap-drop=ALL", "--security-opt=no-new-privileges")
_LIMITS: Final = ("--ulimit=nofile=1024:1024", "--ulimit=nproc=10000:10000")


class Container:
    """`mounts`: a folder here to a path inside. `options`: podman's own. The network is this machine's."""

    def __init__(
        self,
        engine: Engine,
        *arguments: str,
        user: str = "",
        entrypoint: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        mounts: Mapping[Path, str] | None = None,
        options: Sequence[str] = (),
    ) -> None:
        self._engine = engine
        self._create = ["create", "--network=host", *_RESTRICTED, *_LIMITS, *options]
        self._create += [f"--user={user}"] if user else []
        self._create += [f"--entrypoint={json.dumps(list(entrypoint))}"] if entrypoint else []
        self._create += [f"--env={name}={value}" for name, value in (environment or {}).items()]
        self._create += [f"--volume={folder}:{path}" for folder, path in (mounts or {}).items()]
        self._arguments = arguments
        self._id = ""

    def __enter__(self) -> Self:
        self._id = self._engine.podman(*self._create, IMAGE, *self._arguments).strip()
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.podman("rm", "--force", "--time=0", self._id)

    def start(self) -> None:
        """Also once more after an end, as kubelet does."""
        self._engine.podman("start", self._id)

    def signal(self, name: str) -> None:
        self._engine.podman("kill", f"--signal={name}", self._id)

    def wait(self, timeout_seconds: float = HANG_SECONDS) -> int:
        """Its exit code."""
        return int(self._engine.podman("wait", self._id, timeout_seconds=timeout_seconds))

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._engine.podman("inspect", self._id))[0]["State"]
        return found

    def said(self) -> str:
        """Everything on its two outputs, of all its lives."""
        command = self._engine.podman_command("logs", self._id)
        result = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=True)
        return result.stdout + result.stderr

    def log(self, event: str) -> list[dict[str, Any]]:
        """The agent's log lines of one event, in order."""
        return [line for line in json_lines(self.said()) if line["event"] == event]

    def call(self, *command: str) -> str:
        """A further process in it, as kubelet's probes and hooks are; what it printed."""
        return self._engine.podman("exec", self._id, *command)

    def call_command(self, *command: str) -> list[str]:
        """The same for whoever starts it."""
        return self._engine.podman_command("exec", self._id, *command)

    def wait_said(self, text: str, timeout_seconds: float = HANG_SECONDS) -> None:
        """AssertionError with what it did say if it ends without."""

        def settled() -> bool:
            return text in self.said() or not self.state()["Running"]

        wait_until(settled, f"the container says {text!r}", timeout_seconds)
        assert text in self.said(), self.said()


def run(engine: Engine, *arguments: str, user: str = "", entrypoint: Sequence[str] = ()) -> str:
    """What a container printed that ended well; AssertionError otherwise."""
    with Container(engine, *arguments, user=user, entrypoint=entrypoint) as container:
        code = container.wait()
        assert code == 0, f"{code}: {container.said()}"
        return container.said()
