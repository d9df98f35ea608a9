"""Pods for property tests: what users and other webhooks write, and JSON that only looks like it."""

import copy
from typing import Any, Final

from hypothesis import strategies as st

PREFIX: Final = "keepstep.dev/"

_NAMES: Final = st.from_regex(r"[a-z]([-a-z0-9]{0,8}[a-z0-9])?", fullmatch=True)
_TEXTS: Final = st.text(max_size=12)
_PATHS: Final = st.sampled_from(
    [
        "/data",
        "/data/",
        "/out",
        "/out/checkpoints",
        "/keepstep",
        "/keepstep/logs",
        "/run",
        "/run/keepstep",
        "/tmp",
        "/workspace",
    ]
)
_QUANTITIES: Final = st.sampled_from(["1", "500m", "16", "1Gi", "1e3", "0.5", "128974848", "8Gi"])
_SOURCES: Final = st.sampled_from(
    [
        {"fieldRef": {"fieldPath": "metadata.name"}},
        {"secretKeyRef": {"name": "s", "key": "k", "optional": True}},
        {"configMapKeyRef": {"name": "c", "key": "k"}},
        {"resourceFieldRef": {"resource": "limits.cpu"}},
    ]
)
_VARIABLE_NAMES: Final = st.sampled_from(
    [
        *("HOME", "PATH", "PYTHONPATH", "TMPDIR", "RANK", "WORLD_SIZE", "PET_NODE_RANK", "NCCL_DEBUG"),
        *("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "GRPC_ENABLE_FORK_SUPPORT", "KEEPSTEP_AUTOLOAD", "KEEPSTEP_ATTEMPT"),
        *("AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_REGION"),
    ]
)
_VALUES: Final = st.one_of(
    _TEXTS, st.sampled_from(["/lib:/more", "$(HOME)/x", "$(KEEPSTEP_VOLUME)", "/data/token", ""])
)
VOLUME_KINDS: Final[Any] = st.sampled_from(
    [
        # An emptyDir, as the API server has it.
        {},
        {"emptyDir": {}},
        {"emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
        {"emptyDir": {"sizeLimit": "300Gi"}},
        {"persistentVolumeClaim": {"claimName": "c"}},
        {"persistentVolumeClaim": {"claimName": "c", "readOnly": True}},
        {"configMap": {"name": "c"}},
        {"hostPath": {"path": "/mnt"}},
        {"nfs": {"server": "s", "path": "/"}},
    ]
)
_LABELS: Final = st.fixed_dictionaries(
    {},
    optional={
        "app": st.just("train"),
        "jobset.sigs.k8s.io/jobset-uid": st.just("0b2cfb0e-9d4c"),
        "jobset.sigs.k8s.io/restart-attempt": st.sampled_from(["0", "3", "x"]),
        "jobset.sigs.k8s.io/job-index": st.sampled_from(["0", "1"]),
        "training.kubeflow.org/replica-type": st.sampled_from(["master", "worker"]),
        "training.kubeflow.org/replica-index": st.sampled_from(["0", "7", "-1"]),
        "leaderworkerset.sigs.k8s.io/worker-index": st.sampled_from(["0", "2"]),
    },
)


def _optional(**keys: Any) -> Any:
    return st.fixed_dictionaries({}, optional=keys)


_SECURITY: Final = _optional(
    runAsUser=st.sampled_from([0, 1000, 65534]),
    runAsGroup=st.sampled_from([0, 100]),
    runAsNonRoot=st.booleans(),
    seLinuxOptions=st.just({"level": "s0:c1"}),
)
_AMOUNTS: Final = _optional(**{"cpu": _QUANTITIES, "memory": _QUANTITIES, "ephemeral-storage": _QUANTITIES})


@st.composite
def _containers(draw: st.DrawFn, name: str, volumes: list[str]) -> dict[str, Any]:
    container: dict[str, Any] = {"name": name, "image": "example.com/image:1"}
    variables = draw(st.lists(_VARIABLE_NAMES, unique=True, max_size=4))
    if draw(st.booleans()) or variables:
        container["env"] = [
            {
                "name": variable,
                **draw(
                    st.one_of(
                        _VALUES.map(lambda text: {"value": text}),
                        _SOURCES.map(lambda source: {"valueFrom": source}),
                        # Empty text: the API server leaves it away.
                        st.just({}),
                    )
                ),
            }
            for variable in variables
        ]
    if volumes:
        paths = draw(st.lists(_PATHS, unique_by=lambda path: path.rstrip("/"), max_size=3))
        container["volumeMounts"] = [
            {
                "name": draw(st.sampled_from(volumes)),
                "mountPath": path,
                **draw(st.sampled_from([{}, {}, {}, {"readOnly": True}, {"subPath": "a/b"}])),
            }
            for path in paths
        ]
    container |= draw(
        _optional(
            securityContext=_SECURITY,
            resources=_optional(limits=_AMOUNTS, requests=_AMOUNTS),
            ports=st.sampled_from([[], [{"containerPort": 8080}], [{"containerPort": 9400, "hostPort": 9400}]]),
            command=st.just(["python", "train.py"]),
            envFrom=st.just([{"secretRef": {"name": "s"}}]),
        )
    )
    return container


_ANNOTATIONS: Final = _optional(
    **{
        PREFIX + "checkpoint-directory": st.sampled_from(
            ["/out/checkpoints", "/data", "/keepstep/x", "/workspace/a/b"]
        ),
        PREFIX + "output": st.sampled_from(["/out", "/workspace/logs", "/a/b:/logs", "/runs/checkpoints", "/data/x"]),
        PREFIX + "watch": st.sampled_from(["true", "off"]),
        PREFIX + "credentials": st.just("secret"),
        PREFIX + "ca-bundle": st.sampled_from(["c/ca.crt", "secret/s/ca.crt"]),
        PREFIX + "size-limit": st.sampled_from(["200Gi", "1024Gi", "1.5Ti", "1000M", "1e9"]),
        PREFIX + "region": st.sampled_from(["", "eu-west-1"]),
        PREFIX + "medium": st.sampled_from(["memory", "disk"]),
        PREFIX + "grace-seconds": st.sampled_from(["5", "60", "3600"]),
        PREFIX + "autoload": st.sampled_from(["true", "false"]),
        PREFIX + "asynchronous-saves": st.sampled_from(["true", "false"]),
        PREFIX + "temporary-files": st.sampled_from(["true", "false"]),
        PREFIX + "run-as-user": st.sampled_from(["0", "1000"]),
        PREFIX + "attempt": st.just("one"),
        PREFIX + "memory": st.sampled_from(["1Gi", "1024Mi"]),
        PREFIX + "cpu": st.sampled_from(["0.5", "2000m"]),
        PREFIX + "keep-last": st.just("3"),
        "batch.kubernetes.io/job-completion-index": st.sampled_from(["0", "5", "none"]),
    }
)
_ODD: Final = st.dictionaries(
    st.one_of(
        st.sampled_from(["inject", "destination", "grace-seconds", "size-limit", "container", "keep-last"]),
        st.sampled_from(["output", "watch"]),
        st.sampled_from(["zzz", "", "credentials", "injected", "tags", "part-size-bytes", "run-as-user", "ca-bundle"]),
    ).map(lambda name: PREFIX + name),
    st.one_of(
        _TEXTS,
        st.sampled_from(["true", "1e999", "-1", "pvc://a/../b", "s3://", "//", "/a:/b/", "/a:/b/a", "a=b,c", "9" * 40]),
    ),
    max_size=3,
)


@st.composite
def pods(draw: st.DrawFn) -> dict[str, Any]:
    """What users write, and what a cluster takes before us; most can be injected."""
    volumes = draw(st.lists(_NAMES, unique=True, max_size=3))
    names = draw(st.lists(_NAMES, unique=True, min_size=1, max_size=5))
    starting = draw(st.integers(0, len(names) - 1))
    spec: dict[str, Any] = {
        "containers": [draw(_containers(name, volumes)) for name in names[starting:]],
        **draw(
            _optional(
                terminationGracePeriodSeconds=st.sampled_from([0, 5, 30, 600]),
                restartPolicy=st.sampled_from(["Never", "OnFailure", "Always"]),
                securityContext=_SECURITY,
                shareProcessNamespace=st.just(True),
                nodeSelector=st.just({"gpu": "a"}),
                overhead=st.just({"cpu": "100m"}),
                resources=_optional(limits=_AMOUNTS, requests=_AMOUNTS),
            )
        ),
    }
    if draw(st.integers(0, 9)) == 0:
        spec["hostNetwork"] = True
    if draw(st.booleans()) or starting:
        spec["initContainers"] = [
            {**draw(_containers(name, volumes)), **draw(st.sampled_from([{}, {"restartPolicy": "Always"}]))}
            for name in names[:starting]
        ]
    if draw(st.booleans()) or volumes:
        spec["volumes"] = [{"name": name, **draw(VOLUME_KINDS)} for name in volumes]
    annotations = {
        PREFIX + "inject": "true",
        PREFIX + "destination": draw(st.sampled_from(["s3://bucket/run", "pvc://claim/run", "pvc://claim"])),
        PREFIX + "container": draw(st.sampled_from(names[starting:])),
        **draw(_ANNOTATIONS),
    }
    metadata = {"generateName": "train-", "annotations": annotations, **draw(_optional(labels=_LABELS))}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


@st.composite
def odd_pods(draw: st.DrawFn) -> dict[str, Any]:
    """Pods with annotations that nobody should write."""
    pod = draw(pods())
    pod["metadata"]["annotations"] |= draw(_ODD)
    return pod


_KEYS: Final = st.sampled_from(
    [
        *("metadata", "annotations", "labels", "spec", "containers", "initContainers", "volumes", "env", "name"),
        *("value", "valueFrom", "volumeMounts", "mountPath", "subPath", "resources", "limits", "requests", "cpu"),
        *("securityContext", "runAsUser", "emptyDir", "sizeLimit", "ports", "containerPort", "restartPolicy", "os"),
        *("terminationGracePeriodSeconds", "hostPID", "nodeSelector", "persistentVolumeClaim", "ephemeral-storage"),
        *(PREFIX + "inject", PREFIX + "destination", "request", "uid", "object", "operation"),
    ]
)
_SCALARS: Final = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    _TEXTS,
    st.sampled_from(["true", "s3://b/p", "t"]),
)
garbage: Final[Any] = st.recursive(
    _SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_KEYS, inner, max_size=6), max_leaves=40
)


@st.composite
def broken_pods(draw: st.DrawFn) -> Any:
    """A pod with garbage in one or two places of it."""
    # Some parts are the same object in many pods.
    pod = copy.deepcopy(draw(pods()))
    for _ in range(draw(st.integers(1, 2))):
        place: Any = pod
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            key = draw(st.sampled_from(keys))
            inner = place[key]
            if isinstance(place, dict) and draw(st.integers(0, 9)) == 0:
                del place[key]
                break
            if not inner or not isinstance(inner, dict | list) or draw(st.integers(0, 3)) == 0:
                place[key] = draw(garbage)
                break
            place = inner
    return pod
