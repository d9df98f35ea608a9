"""A pod as an API server stores it: every default of the API, canonical quantities, and what its own admission adds.

From k/k pkg/apis/core/v1/defaults.go and the API reference; of the plugins ServiceAccount, Priority and
DefaultTolerationSeconds. What is empty is not stored, as the API's types omit it.
"""

import copy
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, Final

from keepstep_agent.core.injection.pod import parse_quantity

_TOKEN_PATH: Final = "/var/run/secrets/kubernetes.io/serviceaccount"
_TOKEN_VOLUME: Final = "kube-api-access-x7k2p"
_MODE: Final = 0o644
_PROBE: Final = {"timeoutSeconds": 1, "periodSeconds": 10, "successThreshold": 1, "failureThreshold": 3}
_KEPT_EMPTY: Final = frozenset({"resources", "securityContext", "emptyDir", "type"})


def stored(pod: dict[str, Any]) -> dict[str, Any]:
    """`pod` is not changed. A pod that was stored before is stored as it is."""
    made: dict[str, Any] = _without_empty(copy.deepcopy(pod))
    spec = made["spec"]
    for key, value in {
        "restartPolicy": "Always",
        "dnsPolicy": "ClusterFirst",
        "terminationGracePeriodSeconds": 30,
        "securityContext": {},
        "schedulerName": "default-scheduler",
        "enableServiceLinks": True,
        "serviceAccountName": "default",
        "serviceAccount": "default",
        "priority": 0,
        "preemptionPolicy": "PreemptLowerPriority",
        "tolerations": [
            {"key": f"node.kubernetes.io/{key}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}
            for key in ("not-ready", "unreachable")
        ],
    }.items():
        spec.setdefault(key, value)
    for container in _containers(spec):
        _default_container(container)
    if spec.get("automountServiceAccountToken", True):
        _mount_token(spec)
    for volume in spec.get("volumes", []):
        _default_volume(volume)
    _default_pod_resources(spec)
    return made


def _containers(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from spec.get("initContainers", [])
    yield from spec["containers"]


def _default_container(container: dict[str, Any]) -> None:
    container.setdefault("terminationMessagePath", "/dev/termination-log")
    container.setdefault("terminationMessagePolicy", "File")
    tag = container["image"].rpartition("/")[2].partition(":")[2]
    container.setdefault("imagePullPolicy", "Always" if tag in ("", "latest") else "IfNotPresent")
    container.setdefault("resources", {})
    _default_resources(container["resources"])
    for port in container.get("ports", []):
        port.setdefault("protocol", "TCP")
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        if name in container:
            container[name] = {**_PROBE, **container[name]}
    for entry in container.get("env", []):
        source = entry.get("valueFrom", {})
        if "fieldRef" in source:
            source["fieldRef"].setdefault("apiVersion", "v1")
        if "resourceFieldRef" in source:
            source["resourceFieldRef"].setdefault("divisor", "0")


def _default_resources(resources: dict[str, Any]) -> None:
    for key in resources:
        resources[key] = {name: canonical(amount) for name, amount in resources[key].items()}
    if "limits" in resources:
        resources["requests"] = {**resources["limits"], **resources.get("requests", {})}


def _default_pod_resources(spec: dict[str, Any]) -> None:
    """Pod-level requests come from the containers', then from its own limits, once the pod says any limit."""
    resources = spec.get("resources", {})
    for key in resources:
        resources[key] = {name: canonical(amount) for name, amount in resources[key].items()}
    if not resources.get("limits"):
        return
    requests = resources.setdefault("requests", {})
    for name in ("cpu", "memory"):
        together = sum(
            (parse_quantity(one["resources"].get("requests", {}).get(name, 0)) for one in _containers(spec)), Decimal(0)
        )
        if together:
            requests.setdefault(name, canonical(str(together)))
        elif name in resources["limits"]:
            requests.setdefault(name, resources["limits"][name])


def _default_volume(volume: dict[str, Any]) -> None:
    if volume.keys() == {"name"}:
        volume["emptyDir"] = {}
    for kind in ("secret", "configMap", "projected", "downwardAPI"):
        if kind in volume:
            volume[kind].setdefault("defaultMode", _MODE)
    if "sizeLimit" in volume.get("emptyDir", {}):
        volume["emptyDir"]["sizeLimit"] = canonical(volume["emptyDir"]["sizeLimit"])
    if "hostPath" in volume:
        volume["hostPath"].setdefault("type", "")
    for source in volume.get("projected", {}).get("sources", []):
        if "serviceAccountToken" in source:
            source["serviceAccountToken"].setdefault("expirationSeconds", 3600)


def _mount_token(spec: dict[str, Any]) -> None:
    """Of the plugin ServiceAccount, which is called again after the webhooks."""
    mounted = False
    for container in _containers(spec):
        mounts = container.setdefault("volumeMounts", [])
        if not any(mount["mountPath"] == _TOKEN_PATH for mount in mounts):
            mounts.append({"name": _TOKEN_VOLUME, "mountPath": _TOKEN_PATH, "readOnly": True})
            mounted = True
    volumes = spec.setdefault("volumes", [])
    if mounted and not any(volume["name"] == _TOKEN_VOLUME for volume in volumes):
        token = {"serviceAccountToken": {"path": "token", "expirationSeconds": 3607}}
        volumes.append({"name": _TOKEN_VOLUME, "projected": {"sources": [token], "defaultMode": _MODE}})


def canonical(amount: object) -> str:
    """As Kubernetes writes a quantity: the largest suffix of its own family with which no fraction is left."""
    number = parse_quantity(amount)
    if str(amount).endswith("i") and number == int(number):
        return _with_suffix(number, 1024, ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"))
    if number != int(number):
        number, suffixes = number * 1000, ("m",)
        assert number == int(number), amount
        return f"{int(number)}{suffixes[0]}"
    return _with_suffix(number, 1000, ("", "k", "M", "G", "T", "P", "E"))


def _with_suffix(number: Decimal, base: int, suffixes: tuple[str, ...]) -> str:
    whole, at = int(number), 0
    while whole and whole % base == 0 and at < len(suffixes) - 1:
        whole, at = whole // base, at + 1
    return f"{whole}{suffixes[at]}"


def _without_empty(value: Any, key: str = "") -> Any:
    """Null, false, empty texts and lists are nothing, where a field does not tell them from nothing."""
    if isinstance(value, dict):
        inner = {name: _without_empty(one, name) for name, one in value.items()}
        is_map = key in ("annotations", "labels", "nodeSelector", "seLinuxOptions")
        return {name: one for name, one in inner.items() if is_map or name in _KEPT_EMPTY or not _is_nothing(name, one)}
    return [_without_empty(one) for one in value] if isinstance(value, list) else value


_POINTERS: Final = frozenset(
    {
        *("allowPrivilegeEscalation", "automountServiceAccountToken", "enableServiceLinks", "readOnlyRootFilesystem"),
        *("runAsNonRoot", "shareProcessNamespace", "privileged", "optional"),
    }
)
"""Fields in which false is not nothing."""


def _is_nothing(name: str, value: Any) -> bool:
    if value is False:
        return name not in _POINTERS
    return value is None or value == "" or value == [] or (value == {} and name not in _KEPT_EMPTY)
