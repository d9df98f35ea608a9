"""Manifests of small pods whose containers are a few lines of shell: what the simulator itself is tested with."""

from collections.abc import Sequence
from typing import Any

from tests.podsim.images import Image

SHELL = Image(entrypoint=("sh", "-c"), environment={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"})
DATA = {"name": "data", "emptyDir": {}}
MOUNT = {"name": "data", "mountPath": "/data"}

FOREVER = "while :; do sleep 0.05; done"
HEARS = f'trap "exit 0" TERM; echo up; {FOREVER}'
"""Leaves at once when it is told to."""
DEAF = f'trap "echo heard" TERM; echo up; {FOREVER}'


def leaves_after(seconds: float, *, waits_for: str = "/") -> str:
    """It takes its time after SIGTERM, and waits for a file first."""
    waits = f"until test -e {waits_for}; do sleep 0.05; done"
    return f'trap "{waits}; sleep {seconds}; exit 0" TERM; echo up; {FOREVER}'


def container(name: str, script: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "image": "shell", "args": [script], "volumeMounts": [MOUNT], **fields}


def sidecar(name: str, script: str, **fields: Any) -> dict[str, Any]:
    return container(name, script, restartPolicy="Always", **fields)


def pre_stop(script: str) -> dict[str, Any]:
    return {"preStop": {"exec": {"command": ["sh", "-c", script]}}}


def pod(*containers: dict[str, Any], init: Sequence[dict[str, Any]] = (), **spec: Any) -> dict[str, Any]:
    return {
        "metadata": {"generateName": "simulated-"},
        "spec": {
            "restartPolicy": "Never",
            "volumes": [DATA],
            "initContainers": list(init),
            "containers": list(containers),
            **spec,
        },
    }
