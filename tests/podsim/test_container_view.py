"""What a container of the simulator is given: its words, its environment, its user, and its view of the volumes."""

from pathlib import Path

import pytest
from tests.harness.bounds import HANG_SECONDS
from tests.podsim.environment import Objects, environment_of, expand
from tests.podsim.errors import ContainerConfigError
from tests.podsim.identity import identity_of
from tests.podsim.images import Image
from tests.podsim.node import Node
from tests.podsim.path_mapping import rewrite
from tests.podsim.phase import Phase
from tests.podsim.shell_pods import DATA, MOUNT, container, pod
from tests.podsim.volumes import Mount

POD = {
    "metadata": {"name": "one", "uid": "u-1", "labels": {"index": "7"}, "annotations": {"a/b": "text"}},
    "spec": {},
}


def variables(*entries: dict[str, object], objects: Objects | None = None, **fields: object) -> dict[str, str]:
    return environment_of({"env": list(entries), **fields}, POD, objects or Objects())


def test_command_and_args_take_the_place_of_the_images_own_as_kubernetes_has_it() -> None:
    image = Image(entrypoint=("keepstep",), command=("agent",))
    assert image.words([], []) == ["keepstep", "agent"]
    assert image.words([], ["restore"]) == ["keepstep", "restore"]
    assert image.words(["python"], []) == ["python"]
    assert image.words(["python"], ["train.py"]) == ["python", "train.py"]


def test_variables_are_expanded_from_those_before_them_and_two_dollars_are_one() -> None:
    known = {"RANK": "3"}
    assert expand("run-$(RANK)-$(OTHER)-$$(RANK)", known) == "run-3-$(OTHER)-$(RANK)"
    found = variables({"name": "A", "value": "x"}, {"name": "B", "value": "$(A)$(C)"}, {"name": "C", "value": "z"})
    assert found["B"] == "x$(C)"


def test_fields_of_the_pod_become_variables_and_a_label_that_is_not_there_is_empty() -> None:
    def field(path: str) -> dict[str, object]:
        return {"name": path, "valueFrom": {"fieldRef": {"fieldPath": path}}}

    paths = ["metadata.name", "metadata.uid", "metadata.labels['index']", "metadata.annotations['a/b']"]
    found = variables(*map(field, [*paths, "metadata.labels['none']"]))
    assert list(found.values()) == ["one", "u-1", "7", "text", ""]


def test_a_secrets_key_is_a_variable_and_an_optional_one_that_is_missing_is_none() -> None:
    objects = Objects(secrets={"s3": {"key": "value"}})

    def entry(name: str, key: str, *, optional: bool) -> dict[str, object]:
        return {"name": "V", "valueFrom": {"secretKeyRef": {"name": name, "key": key, "optional": optional}}}

    assert variables(entry("s3", "key", optional=False), objects=objects) == {"V": "value"}
    assert variables(entry("s3", "no", optional=True), objects=objects) == {}
    assert variables(entry("no", "key", optional=True), objects=objects) == {}
    for name, key in (("s3", "no"), ("no", "key")):
        with pytest.raises(ContainerConfigError):
            variables(entry(name, key, optional=False), objects=objects)
    assert variables(envFrom=[{"secretRef": {"name": "s3"}, "prefix": "P_"}], objects=objects) == {"P_key": "value"}


def test_the_containers_user_counts_before_the_pods_and_root_is_refused_where_it_must_not_be() -> None:
    spec = {"securityContext": {"runAsUser": 1000, "runAsGroup": 2000, "fsGroup": 3000}}
    found = identity_of(spec, {"securityContext": {"runAsUser": 7}}, Image())
    assert (found.user, found.group, found.other_groups) == (7, 2000, (3000,))
    assert "chown" in found.capabilities
    dropped = {"securityContext": {"capabilities": {"drop": ["ALL"]}}}
    assert identity_of({}, dropped, Image()).capabilities == ()
    with pytest.raises(ContainerConfigError):
        identity_of({}, {"securityContext": {"runAsNonRoot": True}}, Image(user=0))


def test_paths_are_rewritten_where_they_stand_by_themselves_or_lead_a_longer_one() -> None:
    mounts = [
        Mount(source=Path("/tmp/v/data"), target="/tmp"),
        Mount(source=Path("/host/m"), target="/keepstep"),
        Mount(source=Path("/host/d"), target="/keepstep-destination"),
    ]
    for text, wanted in {
        "/keepstep": "/host/m",
        "/keepstep/checkpoints": "/host/m/checkpoints",
        "file:///keepstep-destination/run": "file:///host/d/run",
        "--volume=/keepstep": "--volume=/host/m",
        "/a:/keepstep:/tmp/x": "/a:/host/m:/tmp/v/data/x",
        "/keepstep.txt": "/keepstep.txt",
        "/home/keepstep/tmp": "/home/keepstep/tmp",
        "s3://keepstep/tmp": "s3://keepstep/tmp",
    }.items():
        assert rewrite(text, mounts) == wanted


def test_containers_share_a_volume_under_different_paths(node: Node) -> None:
    other = {"name": "data", "mountPath": "/elsewhere"}
    init = [
        container(
            "writer", "echo shared > $WHERE/file", volumeMounts=[other], env=[{"name": "WHERE", "value": "/elsewhere"}]
        )
    ]
    made = node.run(pod(container("trainer", "cat /data/file"), init=init))
    assert made.wait_ended(HANG_SECONDS) is Phase.SUCCEEDED
    assert made.log("trainer") == "shared\n"


def test_a_config_map_is_files_in_a_volume(short_directory: Path, node: Node) -> None:
    objects = Objects(config_maps={"text": {"words": "to be"}})
    volumes = [DATA, {"name": "text", "configMap": {"name": "text"}}]
    mounts = [MOUNT, {"name": "text", "mountPath": "/text"}]
    with Node(short_directory / "m", images=node.images, objects=objects, namespaces=node.namespaces) as other:
        made = other.run(pod(container("trainer", "cat /text/words", volumeMounts=mounts), volumes=volumes))
        assert made.wait_ended(HANG_SECONDS) is Phase.SUCCEEDED
        assert made.log("trainer") == "to be"


@pytest.mark.root
def test_a_container_sees_its_own_volumes_alone_and_a_hard_link_across_two_mounts_is_refused(real_node: Node) -> None:
    init = [container("restore", "ls / > /data/seen; touch /data/file", volumeMounts=[{**MOUNT, "mountPath": "/data"}])]
    twice = [MOUNT, {"name": "data", "mountPath": "/again"}]
    script = "grep -c root /data/seen; ls -d /again; ln /data/file /again/link || echo refused"
    made = real_node.run(pod(container("trainer", script, volumeMounts=twice), init=init))
    made.wait_ended(HANG_SECONDS)
    log = made.log("trainer")
    assert "/again" in log
    assert "Invalid cross-device link" in log
    assert "refused" in log


@pytest.mark.root
def test_a_read_only_root_can_be_written_in_its_volumes_alone_and_by_its_user(real_node: Node) -> None:
    context = {
        "runAsUser": 1234,
        "runAsGroup": 1234,
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    script = "id -u; touch /tmp/x || echo no; touch /data/x && echo yes; grep -E 'CapEff|NoNewPrivs' /proc/self/status"
    made = real_node.run(pod(container("trainer", script, securityContext=context)))
    assert made.wait_ended(HANG_SECONDS) is Phase.SUCCEEDED
    words = made.log("trainer").split()
    assert {"1234", "no", "yes", "0000000000000000"} <= set(words)
    assert words[words.index("NoNewPrivs:") + 1] == "1"
    assert (real_node.namespaces, made.volume("data").exists()) == (True, False)


def test_a_container_inherits_nothing_of_this_machines_environment(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEPSTEP_VOLUME", "/of/this/machine")
    made = node.run(pod(container("trainer", "echo ${KEEPSTEP_VOLUME:-none}")))
    made.wait_ended(HANG_SECONDS)
    assert made.log("trainer") == "none\n"


@pytest.mark.root
def test_other_containers_processes_are_not_seen(real_node: Node) -> None:
    script = "echo $$; ls /proc/1/cmdline; ps -e -o args || cat /proc/[0-9]*/comm"
    init = [container("agent", "sleep 300", restartPolicy="Always")]
    made = real_node.run(pod(container("trainer", script), init=init, terminationGracePeriodSeconds=1))
    made.wait_ended(HANG_SECONDS)
    log = made.log("trainer")
    assert "sleep 300" not in log
    assert "\nsleep\n" not in log
    assert log.split()[0] == "1"
