"""The image itself: what runs in it, as whom, and what is not in it."""

import http.client
import json
import ssl
from pathlib import Path
from typing import Any

import pytest
from tests.containers.container import Container, run
from tests.containers.engine import Engine
from tests.containers.image import BASE, BASE_DIGEST, IMAGE
from tests.harness.bounds import HANG_SECONDS
from tests.servers.process import accepts, free_port, wait_until
from tests.servers.tls import make_certificate

pytestmark = [pytest.mark.containers, pytest.mark.timeout(2400)]

REVIEW: dict[str, Any] = {
    "apiVersion": "admission.k8s.io/v1",
    "kind": "AdmissionReview",
    "request": {
        "uid": "one",
        "operation": "CREATE",
        "kind": {"group": "", "version": "v1", "kind": "Pod"},
        "resource": {"group": "", "version": "v1", "resource": "pods"},
        "namespace": "training",
        "object": {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "generateName": "train-",
                "annotations": {"keepstep.dev/inject": "true", "keepstep.dev/destination": "s3://bucket/runs/one"},
            },
            "spec": {"containers": [{"name": "trainer", "image": "trainer:1"}]},
        },
    },
}

# In megabytes on top of the base, as a registry's user sees it unpacked. Python itself is some 40 of them.
LARGEST_ADDED_MEGABYTES = 350


def test_every_part_of_keepstep_starts_from_the_one_image(engine: Engine) -> None:
    parts = ("agent", "restore", "webhook", "certificates", "ready", "terminating")
    script = f"keepstep --version; for part in {' '.join(parts)}; do keepstep $part --help; done"
    said = run(engine, f"set -e; {script}", entrypoint=["sh", "-c"])
    assert said.startswith("keepstep, version ")
    for part in parts:
        assert f"Usage: keepstep {part}" in said


def test_the_webhook_reviews_from_a_read_only_root_and_leaves_when_it_is_told(engine: Engine, tmp_path: Path) -> None:
    made = make_certificate(tmp_path / "made")
    certificates = tmp_path / "certificates"
    certificates.mkdir()
    for file, name in ((made.certificate, "tls.crt"), (made.key, "tls.key")):
        (certificates / name).write_bytes(file.read_bytes())
    port, http_port = free_port(), free_port()
    arguments = [f"--image={IMAGE}", "--certificates=/certificates"]
    arguments += [f"--listen=127.0.0.1:{port}", f"--http-listen=127.0.0.1:{http_port}"]
    with Container(engine, "webhook", *arguments, mounts={certificates: "/certificates"}) as webhook:
        wait_until(lambda: accepts(port) or not webhook.state()["Running"], "the webhook listens")
        assert webhook.state()["Running"], webhook.said()
        connection = http.client.HTTPSConnection(
            "127.0.0.1", port, timeout=HANG_SECONDS, context=ssl.create_default_context(cafile=made.certificate)
        )
        connection.request("POST", "/mutate", json.dumps(REVIEW), {"Content-Type": "application/json"})
        answer = json.load(connection.getresponse())
        connection.close()
        assert answer["response"]["uid"] == REVIEW["request"]["uid"]
        assert answer["response"]["allowed"] is True
        assert answer["response"]["patch"]
        webhook.signal("TERM")
        assert webhook.wait() == 0, webhook.said()


def test_it_runs_as_a_numbered_user_that_is_not_root_and_as_any_other_on_a_read_only_root(engine: Engine) -> None:
    write = "for file in /opt/keepstep/x /tmp/x /x; do touch $file 2>/dev/null && echo written; done"
    look = f"id -u; {write}; keepstep --version"
    assert run(engine, look, entrypoint=["sh", "-c"]).split()[0] == "65532"
    # As OpenShift does: a user that no image knows, in root's group.
    for user in ("1000730000:0", "0:0"):
        said = run(engine, look, entrypoint=["sh", "-c"], user=user)
        assert said.split()[0] == user.partition(":")[0]
        assert "keepstep, version" in said
        assert "written" not in said


def test_its_home_is_empty_and_roots_whoever_it_runs_as(engine: Engine) -> None:
    look = "stat -c '%u %a' $HOME; ls -A $HOME; touch $HOME/x 2>/dev/null && echo written"
    for user in ("65532:65532", "1000730000:0"):
        assert run(engine, f"{look}; true", entrypoint=["sh", "-c"], user=user) == "0 555\n"


def test_it_holds_no_compiler_no_installer_and_no_torch(engine: Engine) -> None:
    look = (
        "for tool in gcc cc c++ g++ ld make pip pip3; do command -v $tool; done; "
        "/opt/keepstep/bin/python -c 'import importlib.util as u; "
        'print([name for name in ("torch", "numpy", "pip", "setuptools", "hatchling", "moto", "pytest") '
        "if u.find_spec(name)])'"
    )
    assert run(engine, look, entrypoint=["sh", "-c"]) == "[]\n"


def test_it_says_what_it_is_and_is_not_large(engine: Engine) -> None:
    (image,) = json.loads(engine.podman("image", "inspect", IMAGE))
    (base,) = json.loads(engine.podman("image", "inspect", BASE))
    labels = image["Labels"]
    assert labels["org.opencontainers.image.title"] == "keepstep"
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert labels["org.opencontainers.image.base.name"] == BASE
    assert labels["org.opencontainers.image.base.digest"] == BASE_DIGEST
    assert image["Config"]["User"] == "65532:65532"
    assert image["Config"]["Entrypoint"] == ["keepstep"]
    added = (image["Size"] - base["Size"]) / 1e6
    print(f"the image has {image['Size'] / 1e6:.0f} MB, {added:.0f} of them on top of its base")
    assert added < LARGEST_ADDED_MEGABYTES
