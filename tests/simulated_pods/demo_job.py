"""The demo's trainer as a Job's pod: what a user writes, put through the injection, and run on a simulated node."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonpatch
from tests.harness.agent_process import json_lines
from tests.harness.bounds import HANG_SECONDS
from tests.harness.bucket_view import BucketView
from tests.podsim.environment import Objects
from tests.podsim.images import keepstep_image, python_image
from tests.podsim.node import Node
from tests.podsim.pod import Pod
from tests.servers.fault_proxy import FaultProxy
from tests.servers.server import ACCESS_KEY, SECRET_KEY, Bucket

from keepstep_agent.core.injection.annotations import read_annotations
from keepstep_agent.core.injection.mutation import mutate
from keepstep_agent.core.injection.spec import Injection, InjectionDefaults, Mutation
from keepstep_api.names import AGENT_CONTAINER, RESTORE_CONTAINER

TRAINER = "trainer"
AGENT, RESTORE = AGENT_CONTAINER, RESTORE_CONTAINER
FOREVER_STEPS = 1_000_000
# Longer than any wait: who waits for its end hangs.
GRACE_SECONDS = 3600

_PROGRAM = Path(__file__).parents[2] / "examples" / "demo" / "train.py"
_TEXT = "It is a truth universally acknowledged, that a single checkpoint in possession of a good fortune. " * 40
RESTRICTED = {
    "runAsUser": 1234,
    "runAsGroup": 1234,
    "runAsNonRoot": True,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


class DemoJob:
    """A Job whose pods all save to `bucket`, through `proxy`, and run on a node in `directory`."""

    def __init__(self, directory: Path, bucket: Bucket, proxy: FaultProxy) -> None:
        self.proxy = proxy
        self.view = BucketView(bucket)
        self.node = Node(
            directory,
            images={"keepstep": keepstep_image(), "trainer": python_image()},
            objects=Objects(
                secrets={"s3": {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}},
                config_maps={"text": {"words": _TEXT}},
            ),
        )
        self._annotations = {
            "keepstep.dev/inject": "true",
            "keepstep.dev/destination": bucket.destination,
            "keepstep.dev/credentials": "s3",
            "keepstep.dev/endpoint-url": proxy.endpoint_url,
            "keepstep.dev/part-size-bytes": "5MiB",
        }

    def start(
        self,
        *,
        steps: int = FOREVER_STEPS,
        save_every: int = 0,
        grace_seconds: int = GRACE_SECONDS,
        restart_policy: str = "Never",
        command: Sequence[str] = (),
        labels: Mapping[str, str] | None = None,
        restore: str = "whole",
    ) -> "DemoPod":
        """One pod of the Job, as after its admission. `command`: another program than the demo's.

        `labels`: as its launcher sets them.
        """
        demo = ["python", str(_PROGRAM), "--text", "/text/words"]
        trainer = {
            "name": TRAINER,
            "image": "trainer",
            "command": list(command) or [*demo, "--steps", str(steps), "--save-every", str(save_every)],
            "volumeMounts": [{"name": "text", "mountPath": "/text"}],
            "securityContext": RESTRICTED,
        }
        said = {
            **self._annotations,
            "keepstep.dev/grace-seconds": str(grace_seconds),
            "keepstep.dev/restore": restore,
        }
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"generateName": "demo-", "annotations": said, "labels": dict(labels or {})},
            "spec": {
                "restartPolicy": restart_policy,
                "terminationGracePeriodSeconds": grace_seconds,
                # The simulator's pods have this machine's network, and no port of their own.
                "hostNetwork": True,
                "volumes": [{"name": "text", "configMap": {"name": "text"}}],
                "containers": [trainer],
            },
        }
        return DemoPod(self.node.run(injected(pod)))

    def stored_steps(self) -> list[int]:
        """Steps with a commit marker, straight from the server."""
        return self.view.steps()

    def wait_stored(self, step: int, pod: "DemoPod") -> None:
        pod.pod.wait(lambda: step in self.stored_steps(), HANG_SECONDS, f"step {step} is durable")

    def stored_kinds(self) -> dict[int, str]:
        """Of each committed step."""
        markers = [json.loads(self.view.read(key)) for key in self.view.markers()]
        return {marker["step"]: marker["kind"] for marker in markers}


class DemoPod:
    """One pod of the Job, and what its trainer printed."""

    def __init__(self, pod: Pod) -> None:
        self.pod = pod

    def said(self) -> list[dict[str, Any]]:
        return _json_lines(self.pod.log(TRAINER))

    def begun(self) -> list[int]:
        """At which step each start of the trainer began; 0 is afresh."""
        return [line["begun"] for line in self.said() if "begun" in line]

    def steps(self) -> list[int]:
        """Every step it has trained, in order, over all starts."""
        return [line["step"] for line in self.said() if "step" in line]

    def wait_begun(self, times: int = 1) -> int:
        """The step at which the trainer began the last time."""
        self.pod.wait(lambda: len(self.begun()) >= times, HANG_SECONDS, f"the trainer begins for the {times}. time")
        return self.begun()[-1]

    def wait_step(self, step: int) -> None:
        self.pod.wait(lambda: max(self.steps(), default=0) >= step, HANG_SECONDS, f"step {step} is trained")

    def save_now(self) -> int:
        """Have the trainer save at its next step, and return that step once the agent has pinned it."""
        before = self.staged_steps()
        code, output = self.pod.execute(AGENT, ["keepstep", "save"], HANG_SECONDS)
        assert code == 0, output
        self.pod.wait(lambda: len(self.staged_steps()) > len(before), HANG_SECONDS, "the save is pinned")
        return self.staged_steps()[-1]

    def staged_steps(self) -> list[int]:
        """What the agent has taken into its keeping, in order; the trainer may lose its own copy since."""
        steps = {line["save"]: line["step"] for line in self.agent_log("checkpoint.announced")}
        return [steps[line["save"]] for line in self.agent_log("checkpoint.staged")]

    def agent_log(self, event: str) -> list[dict[str, Any]]:
        return [line for line in json_lines(self.pod.log(AGENT)) if line["event"] == event]

    def agent_status(self) -> dict[str, Any]:
        """`keepstep status --json` in the agent's container, as an operator would ask."""
        code, output = self.pod.execute(AGENT, ["keepstep", "status", "--json"], HANG_SECONDS)
        assert code == 0, output
        status: dict[str, Any] = json.loads(output)
        return status

    def not_durable(self) -> list[str]:
        """What the agent said on leaving, one line per checkpoint."""
        return [line for line in self.pod.log(AGENT).splitlines() if line.startswith("keepstep: not durable: ")]


def injected(pod: dict[str, Any]) -> dict[str, Any]:
    """As the webhook changes it."""
    defaults = InjectionDefaults(image="keepstep")
    injection = read_annotations(pod["metadata"]["annotations"], defaults)
    assert isinstance(injection, Injection), injection
    mutation = mutate(pod, injection, defaults)
    assert isinstance(mutation, Mutation), mutation
    changed: dict[str, Any] = jsonpatch.apply_patch(pod, list(mutation.patch))
    return changed


def _json_lines(text: str) -> list[dict[str, Any]]:
    """What the program printed, among what else comes to its log; its last line may be half written."""
    lines = text.splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}\n")]
