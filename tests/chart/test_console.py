"""The console's objects: off by default, started with flags that it has, with no power and a network of its own."""

import http.client
import ipaddress
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.chart.rendering import HelmError, Object, is_of_console, of_kind, render
from tests.chart.values_matrix import MATRIX
from tests.harness.bounds import HANG_SECONDS
from tests.servers.process import Daemon, free_port, wait_until
from tests.servers.server import ACCESS_KEY, SECRET_KEY, Bucket

from keepstep_agent.cli.destination.console import console
from keepstep_agent.core.settings.table import setting_fields

TOKEN, PROXY = (MATRIX[f"the console, {how}"] for how in ("with a token", "behind a proxy"))
NAME = "keepstep-console"
CONSOLES = pytest.mark.parametrize("values", [TOKEN, PROXY], ids=["with a token", "behind a proxy"])


def pod_of(objects: list[Object]) -> Object:
    pod: Object = of_kind(objects, "Deployment", NAME)["spec"]["template"]
    return pod


def container_of(objects: list[Object]) -> Object:
    (container,) = pod_of(objects)["spec"]["containers"]
    return dict(container)


def options_of(objects: list[Object]) -> dict[str, Any]:
    """As the real command line understands the flags. Raises what an admin would be told."""
    command, *flags = container_of(objects)["args"]
    assert command == console.name
    return dict(console.make_context(command, flags).params)


def changed(values: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**values, "console": {**values["console"], **changes}}


def test_without_the_switch_there_is_nothing_of_it() -> None:
    for values in (MATRIX["defaults"], changed(TOKEN, enabled=False), changed(PROXY, enabled=False)):
        assert not [one for one in render(values) if is_of_console(one)]


@CONSOLES
def test_the_switch_adds_its_own_objects_and_changes_no_other(values: dict[str, Any]) -> None:
    objects = render(values)
    own = [one for one in objects if is_of_console(one)]
    assert sorted(one["kind"] for one in own) == ["Deployment", "NetworkPolicy", "Service", "ServiceAccount"]
    assert {one["metadata"]["name"] for one in own} == {NAME}
    assert [one for one in objects if not is_of_console(one)] == render(changed(values, enabled=False))


def test_with_a_token_it_is_started_with_what_values_say() -> None:
    told = options_of(render(TOKEN))
    container = container_of(render(TOKEN))
    assert told["destination"] == TOKEN["console"]["destination"]
    assert told["address"] == ("", container["ports"][0]["containerPort"])
    assert (told["user_header"], told["trusted_proxies"], told["endpoint_url"]) == ("", (), None)
    volumes = {one["name"]: one["secret"]["secretName"] for one in pod_of(render(TOKEN))["spec"]["volumes"]}
    assert volumes == {"credentials": "runs-read-only", "token": "console-token"}
    mounts = {one["name"]: one for one in container["volumeMounts"]}
    assert str(told["token_file"].parent) == mounts["token"]["mountPath"]
    variable = next(one.environment for one in setting_fields() if one.key == "store.credentials_directory")
    assert container["env"] == [{"name": variable, "value": mounts["credentials"]["mountPath"]}]
    assert all(one["readOnly"] for one in mounts.values())


def test_behind_a_proxy_it_is_started_with_what_values_say() -> None:
    told = options_of(render(PROXY))
    said = PROXY["console"]
    assert told["user_header"] == said["userHeader"]
    assert told["trusted_proxies"] == tuple(map(ipaddress.ip_network, said["trustedProxies"]))
    assert told["endpoint_url"] == said["endpointUrl"]
    assert (told["refresh_every"], told["abandoned_after"], told["token_file"]) == (60, 36 * 3600, None)
    (volume,) = pod_of(render(PROXY))["spec"]["volumes"]
    (mount,) = container_of(render(PROXY))["volumeMounts"]
    assert volume["configMap"]["name"] == said["caBundle"]
    assert told["ca_bundle"] == f"{mount['mountPath']}/{volume['configMap']['items'][0]['path']}"
    assert "env" not in container_of(render(PROXY))
    spec = pod_of(render(PROXY))["spec"]
    assert spec["imagePullSecrets"] == PROXY["image"]["pullSecrets"]
    assert spec["tolerations"] == PROXY["tolerations"]
    assert spec["nodeSelector"] == {"kubernetes.io/os": "linux", **PROXY["nodeSelector"]}
    assert container_of(render(PROXY))["resources"] == said["resources"]


def test_it_serves_with_the_secrets_as_they_are_mounted(
    rclone_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = changed(TOKEN, destination=rclone_bucket.destination, endpointUrl=rclone_bucket.endpoint_url)
    container = container_of(render(values))
    secrets = {
        "credentials": {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY},
        "token": {"token": "a token that is long enough"},
    }
    for name, keys in secrets.items():
        (tmp_path / name).mkdir()
        for key, value in keys.items():
            (tmp_path / name / key).write_text(value)
        # The mount is all that it has.
        for key in keys:
            monkeypatch.delenv(key, raising=False)
    mounts = {one["mountPath"]: str(tmp_path / one["name"]) for one in container["volumeMounts"]}
    port = free_port()

    def here(text: str) -> str:
        for path, folder in mounts.items():
            text = text.replace(f"={path}/", f"={folder}/") if "=" in text else text.replace(path, folder)
        return text.replace("=:8400", f"=127.0.0.1:{port}")

    command = [sys.executable, "-m", "keepstep_agent", *map(here, container["args"])]
    console = Daemon(command, tmp_path / "log", {one["name"]: here(one["value"]) for one in container["env"]})
    try:
        console.wait_for_port(port)
        ready = container["readinessProbe"]["httpGet"]["path"]
        wait_until(lambda: status(port, ready) == 200, "it has looked for runs with the mounted keys")
        assert status(port, container["livenessProbe"]["httpGet"]["path"]) == 200
        assert status(port, "/api/runs") == 401
        assert status(port, "/api/runs", Authorization=f"Bearer {secrets['token']['token']}") == 200
    finally:
        console.stop()


def status(port: int, path: str, **headers: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG_SECONDS)
    try:
        connection.request("GET", path, headers=headers)
        return connection.getresponse().status
    finally:
        connection.close()


def test_every_flag_of_the_console_is_the_charts_to_set() -> None:
    """But for those that nobody has wanted to change: a flag that is new gets a value, or a line here."""
    passed = {flag.split("=")[0] for values in (TOKEN, PROXY) for flag in container_of(render(values))["args"][2:]}
    options = {option.name: set(option.opts) for option in console.params}
    left = {name for name, flags in options.items() if not flags & passed}
    assert left == {"destination", "region", "addressing", "requester_pays", "verify_tls", "log_format"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"destination": ""}, "console.destination is missing; hint: "),
        ({"tokenSecret": ""}, "whoever reaches it; hint: console.tokenSecret"),
        ({"userHeader": "X-Forwarded-User"}, "could send console.userHeader; hint: console.trustedProxies"),
    ],
)
def test_what_would_be_open_or_empty_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(HelmError, match=says):
        render(changed(TOKEN, **changes))


@CONSOLES
def test_its_pod_is_restricted_and_has_no_token_of_the_cluster(values: dict[str, Any]) -> None:
    objects = render(values)
    spec = pod_of(objects)["spec"]
    assert spec["serviceAccountName"] == NAME
    assert spec["automountServiceAccountToken"] is False
    assert of_kind(objects, "ServiceAccount", NAME)["automountServiceAccountToken"] is False
    assert spec["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert container_of(objects)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not [
        one
        for one in objects
        if one["kind"].endswith("RoleBinding") and NAME in {who["name"] for who in one["subjects"]}
    ]


@CONSOLES
def test_every_label_that_is_selected_is_its_pods_and_not_the_webhooks(values: dict[str, Any]) -> None:
    objects = render(values)
    labels = pod_of(objects)["metadata"]["labels"]
    webhooks = of_kind(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
    for selector in [
        of_kind(objects, "Deployment", NAME)["spec"]["selector"]["matchLabels"],
        of_kind(objects, "Service", NAME)["spec"]["selector"],
        of_kind(objects, "NetworkPolicy", NAME)["spec"]["podSelector"]["matchLabels"],
    ]:
        assert selector.items() <= labels.items()
        assert not selector.items() <= webhooks.items()
    for kind in ("Deployment", "Service", "NetworkPolicy"):
        of_webhook = of_kind(objects, kind)["spec"]
        selector = of_webhook.get("podSelector") or of_webhook["selector"]
        assert not selector.get("matchLabels", selector).items() <= labels.items()
    for name, value in values["console"].get("podLabels", {}).items():
        assert labels[name] == (value if "keepstep" not in name and "component" not in name else "console")


@CONSOLES
def test_its_service_and_its_probes_lead_to_its_port(values: dict[str, Any]) -> None:
    objects = render(values)
    container = container_of(objects)
    (port,) = of_kind(objects, "Service", NAME)["spec"]["ports"]
    assert port["targetPort"] == container["ports"][0]["name"]
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": port["targetPort"]}
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": port["targetPort"]}


def test_its_network_is_open_to_whom_values_name_to_dns_and_to_the_store() -> None:
    dns = {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]}
    closed = of_kind(render(TOKEN), "NetworkPolicy", NAME)["spec"]
    assert closed["policyTypes"] == ["Ingress", "Egress"]
    assert closed["ingress"] == []
    assert closed["egress"] == [dns, {"ports": [{"port": 443, "protocol": "TCP"}]}]
    opened = of_kind(render(PROXY), "NetworkPolicy", NAME)["spec"]
    (ingress,) = opened["ingress"]
    assert ingress == {"ports": [{"port": "http", "protocol": "TCP"}], "from": PROXY["console"]["allowedFrom"]}
    assert [port["port"] for port in opened["egress"][1]["ports"]] == PROXY["console"]["storePorts"]
    without = render({**TOKEN, "networkPolicy": {"enabled": False}})
    assert not [one for one in without if one["kind"] == "NetworkPolicy"]
