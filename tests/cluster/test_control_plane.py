"""What starts a control plane, as far as it can be seen where there is none: programs stand in for its own."""

import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import aiohttp
import pytest
from tests.chart.rendering import of_kind, render
from tests.cluster.api import Object, path_of
from tests.cluster.control_plane import (
    ControlPlane,
    NoAssetsError,
    api_server_command,
    etcd_command,
    find_assets,
)
from tests.cluster.credentials import make_credentials
from tests.cluster.installation import changed_for_a_process, without_classes, write_account
from tests.harness.bounds import HANG_SECONDS
from tests.injection import golden_pods
from tests.servers.process import accepts

from keepstep_agent.adapters.kubernetes import ApiServer
from keepstep_agent.core.errors import ClusterError

ROOT = Path(__file__).parents[2]


def stand_in(folder: Path, name: str, script: str = "") -> None:
    run = f'exec "{sys.executable}" -m tests.cluster.stand_in {name} "$@"'
    (folder / name).write_text(f'#!/bin/sh\ncd "{ROOT}"\n{script or run}\n')
    (folder / name).chmod(0o755)


@pytest.fixture
def assets(tmp_path: Path) -> Path:
    folder = tmp_path / "assets"
    folder.mkdir()
    for name in ("etcd", "kube-apiserver"):
        stand_in(folder, name)
    return folder


def test_it_runs_while_its_context_is_open_and_knows_its_admin(assets: Path, tmp_path: Path) -> None:
    with ControlPlane(assets, tmp_path) as control_plane:
        port = int(control_plane.url.rpartition(":")[2])
        assert control_plane.api().get_text("/whoami") == "admin of system:masters"
    assert not accepts(port)


@pytest.mark.parametrize("name", ["etcd", "kube-apiserver"])
def test_a_program_that_ends_is_told_with_its_last_words(assets: Path, tmp_path: Path, name: str) -> None:
    stand_in(assets, name, "echo 'error: unknown flag: --what'; exit 1")
    with (
        pytest.raises((RuntimeError, AssertionError), match="unknown flag: --what"),
        ControlPlane(assets, tmp_path),
    ):
        raise AssertionError("it does not run")


def test_without_binaries_it_says_what_is_missing_and_whether_somebody_meant_them_to_be_there(
    assets: Path, tmp_path: Path
) -> None:
    assert find_assets(str(assets)) == assets
    with pytest.raises(
        NoAssetsError, match="KUBEBUILDER_ASSETS names no folder with etcd and kube-apiserver"
    ) as caught:
        find_assets(None)
    assert not caught.value.told
    (assets / "etcd").chmod(0o644)
    with pytest.raises(NoAssetsError, match=r"which has no etcd$") as caught:
        find_assets(str(assets))
    assert caught.value.told


def test_all_that_is_started_listens_on_loopback_alone(tmp_path: Path) -> None:
    etcd = flags_of(etcd_command(Path("etcd"), tmp_path, 1, 2, syncs=True))
    assert {url.rpartition(":")[0] for name, url in etcd.items() if name.endswith("-urls")} == {"http://127.0.0.1"}
    api_server = flags_of(api_server_command(Path("kube-apiserver"), tmp_path, make_credentials(tmp_path), 1, 2))
    assert api_server["bind-address"] == "127.0.0.1"
    assert api_server["authorization-mode"] == "RBAC"
    files = [path for name, path in api_server.items() if name.endswith(("-file", "-key-file"))]
    assert len(files) == 5
    assert all(Path(path).is_file() for path in files)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl on this machine")
def test_the_key_of_tokens_is_in_the_form_that_an_api_server_reads(tmp_path: Path) -> None:
    """`ParseECPrivateKey` wants SEC 1's structure, whose first element is the integer 1; in PKCS#8 it is 0."""
    key = make_credentials(tmp_path).token_key
    assert key.read_text().startswith("-----BEGIN EC PRIVATE KEY-----\n")
    parsed = subprocess.run(["openssl", "asn1parse", "-in", key], capture_output=True, text=True, timeout=HANG_SECONDS)
    assert re.search(r"\n\s+\d+:d=1 .*INTEGER\s+:01\n.*OCTET STRING", parsed.stdout), parsed.stdout + parsed.stderr
    checked = subprocess.run(
        ["openssl", "ec", "-in", key, "-check", "-noout"], capture_output=True, timeout=HANG_SECONDS
    )
    assert checked.returncode == 0, checked.stderr


def test_a_golden_pod_is_sent_without_its_classes_and_what_they_alone_may_set() -> None:
    """The API server refuses `overhead` of a pod whose RuntimeClass defines none."""
    sent = {case.path.stem: (case.pod["spec"], without_classes(case.pod)["spec"]) for case in golden_pods.cases()}
    assert any("overhead" in asked for asked, _ in sent.values()), "some golden pod has one"
    for asked, changed in sent.values():
        assert not changed.keys() & {"priorityClassName", "runtimeClassName", "overhead"}
        assert asked.keys() - changed.keys() <= {"priorityClassName", "runtimeClassName", "overhead"}


def flags_of(command: list[str]) -> dict[str, str]:
    flags = [argument.removeprefix("--").split("=", 1) for argument in command[1:]]
    assert all(argument.startswith("--") for argument in command[1:])
    assert len({name for name, _ in flags}) == len(flags)
    return dict(flags)


@pytest.mark.parametrize(
    ("content", "path"),
    [
        ({"apiVersion": "v1", "kind": "Pod"}, "/api/v1/namespaces/n/pods"),
        ({"apiVersion": "v1", "kind": "Namespace"}, "/api/v1/namespaces"),
        (
            {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy"},
            "/apis/networking.k8s.io/v1/namespaces/n/networkpolicies",
        ),
        (
            {"apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingWebhookConfiguration"},
            "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations",
        ),
    ],
)
def test_an_objects_path_is_its_kinds(content: Object, path: str) -> None:
    assert path_of({**content, "metadata": {"namespace": "n", "name": "one"}}) == path


def test_what_is_changed_of_the_chart_is_where_the_webhook_is_called_and_nothing_else() -> None:
    objects = render()
    changed = [changed_for_a_process(one, 12345) for one in objects]
    different = [new["kind"] for old, new in zip(objects, changed, strict=True) if old != new]
    assert sorted(different) == ["MutatingWebhookConfiguration", "Service"]
    (webhook,) = of_kind(changed, "MutatingWebhookConfiguration")["webhooks"]
    service = of_kind(changed, "Service")
    assert webhook["clientConfig"]["service"]["port"] == 12345
    assert webhook["clientConfig"]["service"]["name"] == service["metadata"]["name"]
    assert service["spec"] == {"type": "ExternalName", "externalName": "localhost"}


async def test_the_webhooks_client_takes_the_service_account(assets: Path, tmp_path: Path) -> None:
    with ControlPlane(assets, tmp_path) as control_plane, ThreadPoolExecutor(1) as executor:
        write_account(tmp_path / "account", control_plane.authority, "secret")
        port = int(control_plane.url.rpartition(":")[2])
        told = ApiServer("127.0.0.1", port, tmp_path / "account", executor, call_seconds=60, hint="")
        # The stand-in knows its callers by their certificates alone: it was reached, verified, and hung up.
        with pytest.raises(ClusterError, match="does not answer") as caught:
            await told.call("GET", "/api/v1")
        await told.close()
    assert not isinstance(caught.value.__cause__, aiohttp.ClientConnectorCertificateError)
