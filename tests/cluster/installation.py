"""The chart, installed in a control plane as Helm would, and its webhook and its Job as processes beside it.

Two things are changed, because nothing runs in such a cluster: the Service leads to localhost, and the configuration
calls it at the port of our process. The API server still verifies the Service's name by `caBundle`.
"""

import copy
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Final, Self

import yaml
from tests.chart.rendering import NAMESPACE, Object, arguments_of, of_kind, render
from tests.cluster.api import ApiError
from tests.cluster.control_plane import ControlPlane
from tests.harness.agent_process import wait_until
from tests.harness.bounds import HANG_SECONDS
from tests.harness.installed_chart import SECRET, mount_secret, run_job
from tests.harness.webhook_process import WebhookProcess, training_pod

_OURS: Final = ("--listen=", "--http-listen=", "--certificates=", "--image=", "--lame-duck-seconds=")
_TOKEN_SECONDS: Final = 3600


class Installation:
    """The objects in a cluster. Made once; `failure_policy` can be changed while it is there."""

    def __init__(self, control_plane: ControlPlane, port: int) -> None:
        self.api = control_plane.api()
        self.port = port
        version = self.api.get_text("/version")
        git_version = yaml.safe_load(version)["gitVersion"]
        self.objects = [
            changed_for_a_process(one, port)
            for one in render(None, f"--kube-version={git_version}")
            if not _is_hook(one)
        ]
        self._control_plane = control_plane
        self.url = control_plane.url
        self.warnings: list[str] = []
        self._numbers = count()

    def install(self) -> None:
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
        for one in [namespace, *self.objects]:
            self.warnings += self.api.create(one).warnings

    def upgrade(self) -> None:
        """Everything once more."""
        for one in self.objects:
            self.api.apply(one, "helm")

    def set_failure_policy(self, policy: str) -> None:
        webhooks = [{"name": one["name"], "failurePolicy": policy} for one in self.configuration["webhooks"]]
        self.api.patch(self.configuration, {"webhooks": webhooks})

    def make_namespace(self, labels: Mapping[str, str] | None = None) -> str:
        """A new one, in which pods may be injected."""
        name = f"research-{next(self._numbers)}"
        metadata = {"name": name, "labels": dict(labels or {})}
        self.api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
        return name

    def wait_until_asked(self) -> None:
        """The API server, which hears of every change some time later, has the webhook inject."""
        namespace = self.make_namespace()

        def injects() -> bool:
            pod = training_pod()
            pod["metadata"]["namespace"] = namespace
            try:
                made = self.api.create(pod, dry_run=True).object
            except ApiError:
                return False
            return "keepstep-agent" in str(made["spec"])

        wait_until(injects, HANG_SECONDS, "pods are injected")

    @property
    def configuration(self) -> Object:
        return self.api.get(of_kind(self.objects, "MutatingWebhookConfiguration"))

    @property
    def secret(self) -> Object:
        return self.api.get(of_kind(self.objects, "Secret", SECRET))

    def run_job(self, folder: Path) -> None:
        """With its service account's files in a new folder, as kubelet mounts them."""
        account = of_kind(self.objects, "ServiceAccount", "keepstep-certs")
        write_account(folder, self._control_plane.authority, self.api.create_token(account, _TOKEN_SECONDS))
        done = run_job(self.url, folder)
        assert done.returncode == 0, done.stderr


class InstalledWebhook(WebhookProcess):
    """The process that the chart's Deployment would run, with its flags, and the Secret that the Job has filled."""

    def __init__(self, folder: Path, installation: Installation) -> None:
        _, *flags = arguments_of(installation.objects)
        super().__init__(
            folder,
            *(flag for flag in flags if not flag.startswith(_OURS)),
            f"--listen=127.0.0.1:{installation.port}",
            "--lame-duck-seconds=0",
        )
        self._installation = installation
        self._numbers = count()
        self.port = installation.port

    def __enter__(self) -> Self:
        self.renew()
        self.start()
        return self

    def renew(self) -> None:
        """Run the Job, and mount what it has written."""
        self._installation.run_job(self.folder / f"service-account-{next(self._numbers)}")
        self.mount()

    def mount(self) -> None:
        mount_secret(self, self._installation.secret)


def write_account(folder: Path, authority: Path, token: str) -> None:
    folder.mkdir(parents=True)
    (folder / "token").write_text(token)
    (folder / "ca.crt").write_bytes(authority.read_bytes())


def without_classes(pod: Object) -> Object:
    """A pod that names no class of a cluster that has none; `overhead` is its RuntimeClass's, and is refused alone."""
    changed = copy.deepcopy(pod)
    for of_a_class in ("priorityClassName", "runtimeClassName", "overhead"):
        changed["spec"].pop(of_a_class, None)
    return changed


def _is_hook(one: Object) -> bool:
    return "helm.sh/hook" in one["metadata"].get("annotations", {})


def changed_for_a_process(one: Object, port: int) -> Object:
    changed = copy.deepcopy(one)
    match one["kind"]:
        case "Service":
            changed["spec"] = {"type": "ExternalName", "externalName": "localhost"}
        case "MutatingWebhookConfiguration":
            for webhook in changed["webhooks"]:
                webhook["clientConfig"]["service"]["port"] = port
    return changed
