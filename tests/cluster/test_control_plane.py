"""What starts a control plane, as far as it can be seen where there is none: programs stand in for its own."""

import sys
from pathlib import Path

import pytest
import yaml
from kubernetes import client, config
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
from tests.cluster.installation import changed_for_a_process, kubeconfig
from tests.servers.process import accepts

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


def test_the_kubernetes_client_takes_the_kubeconfig(tmp_path: Path) -> None:
    authority = make_credentials(tmp_path).serving.certificate
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(kubeconfig("https://127.0.0.1:6443", authority, "secret")))
    loaded = client.Configuration()
    config.load_kube_config(str(tmp_path / "kubeconfig"), client_configuration=loaded)
    assert loaded.host == "https://127.0.0.1:6443"
    assert loaded.ssl_ca_cert == str(authority)
