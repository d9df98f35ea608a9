"""A Secret whose owner replaces it: what a container that runs sees of that, as on a real node."""

from pathlib import Path

from tests.harness.bounds import HANG_SECONDS
from tests.podsim.environment import Objects
from tests.podsim.node import Node
from tests.podsim.phase import Phase
from tests.podsim.shell_pods import DATA, MOUNT, container, pod
from tests.podsim.volumes import write_atomically

_SECRET = {"name": "keys", "secret": {"secretName": "keys"}}
_VARIABLE = {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "key"}}}


def test_a_replaced_secret_is_seen_in_its_volume_and_not_in_a_variable(short_directory: Path, node: Node) -> None:
    mounts = [MOUNT, {"name": "keys", "mountPath": "/keys"}]
    look = "echo $KEY $(cat /keys/key) $(cat /keys/more)"
    script = f"{look}; echo up; until test -e /data/go; do sleep 0.05; done; {look}"
    objects = Objects(secrets={"keys": {"key": "old"}})
    with Node(short_directory / "m", images=node.images, objects=objects, namespaces=node.namespaces) as other:
        trainer = container("trainer", script, volumeMounts=mounts, env=[_VARIABLE])
        made = other.run(pod(trainer, volumes=[DATA, _SECRET]))
        made.wait(lambda: "up" in made.log("trainer"), HANG_SECONDS, "it has looked")
        other.replace_secret("keys", {"key": "new", "more": "too"})
        (made.volume("data") / "go").touch()
        assert made.wait_ended(HANG_SECONDS) is Phase.SUCCEEDED
        lines = [line for line in made.log("trainer").splitlines() if line.startswith("old")]
        assert lines == ["old old", "old new too"]


def test_all_files_are_replaced_at_once_and_those_that_are_no_more_go(tmp_path: Path) -> None:
    write_atomically(tmp_path, {"a": "1", "b": "1", "c/d": "1"})
    seen_before = (tmp_path / "..data").resolve()
    assert (tmp_path / "c/d").read_text() == "1"
    write_atomically(tmp_path, {"a": "2", "b": "2"})
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith("..")) == ["a", "b"]
    assert [(tmp_path / name).read_text() for name in "ab"] == ["2", "2"]
    assert not seen_before.exists()
