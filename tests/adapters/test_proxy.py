"""Which proxy a request takes, and that the store and the receivers of events agree on it."""

import asyncio
import json
from datetime import UTC, datetime, timedelta

import aiobotocore.httpsession
import pytest
from tests.servers.fault_proxy import FaultProxy
from tests.servers.scripted import Asked, ScriptedServer, response
from tests.servers.server import ACCESS_KEY, SECRET_KEY, Bucket

import keepstep_agent.adapters.s3.http_session  # noqa: F401  # which replaces botocore's choice of proxy
from keepstep_agent.adapters.open_store import open_store
from keepstep_agent.adapters.receivers.url import post_event
from keepstep_agent.adapters.transfer.proxy import proxy_for
from keepstep_agent.core.errors import EventReceiverError

_NAMES = ("http_proxy", "https_proxy", "no_proxy", "all_proxy")


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _NAMES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.mark.parametrize(
    ("url", "entry"),
    [
        ("https://10.1.2.3:9000/a", "10.0.0.0/8"),
        ("https://10.1.2.3/a", "other.example, 10.1.2.3"),
        ("https://10.1.2.3:9000/a", "10.1.2.3:9000"),
        ("https://[fd00::7]:9000/a", "fd00::/8"),
        ("https://[fd00::7]/a", "[fd00::7]"),
        ("https://[fd00::7]:9000/a", "[fd00::7]:9000"),
        ("https://minio.storage.svc.cluster.local/a", ".svc.cluster.local"),
        ("https://minio.storage.svc.cluster.local/a", "cluster.local"),
        ("https://Minio.Storage/a", "*.storage"),
        ("https://minio/a", "a,minio b"),
        ("https://minio:443/a", "minio:443"),
        ("https://minio/a", "minio:443"),
        ("https://anything.example/a", "*"),
    ],
)
def test_no_proxy_names_a_host(url: str, entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", entry)
    assert proxy_for(url) is None


@pytest.mark.parametrize(
    ("url", "entry"),
    [
        ("https://11.1.2.3/a", "10.0.0.0/8"),
        ("https://10.1.2.3:9001/a", "10.1.2.3:9000"),
        ("https://ministorage/a", "storage"),
        ("https://storage.example.com/a", "example"),
        ("https://10.example/a", "10.0.0.0/8"),
        ("https://minio/a", ""),
        ("https://minio/a", ",. ,"),
        ("https://minio/a", "10.0.0.0/99"),
    ],
)
def test_no_proxy_names_other_hosts(url: str, entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", entry)
    assert proxy_for(url) == "http://proxy:3128"


def test_each_scheme_has_its_proxy_which_may_be_named_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "proxy:3128")
    assert (proxy_for("https://a/"), proxy_for("http://a/")) == ("http://proxy:3128", None)


async def _accept(asked: Asked, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")


async def test_events_take_the_proxy_and_leave_out_what_no_proxy_names(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ScriptedServer(_accept) as proxy, ScriptedServer(_accept) as receiver:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        await post_event("http://events.example.test/hook", b"{}", 10.0)
        monkeypatch.setenv("NO_PROXY", "127.0.0.0/8")
        await post_event(f"{receiver.url}/hook", b"{}", 10.0)
    assert [one.target for one in proxy.asked] == ["http://events.example.test/hook"]
    assert [one.target for one in receiver.asked] == ["/hook"]


async def test_a_proxy_that_is_not_there_is_named_as_a_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    with pytest.raises(EventReceiverError) as caught:
        await post_event("http://events.example.test/secret", b"{}", 10.0)
    assert "HTTP_PROXY" in caught.value.hint
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "host",
    ["169.254.169.254", "169.254.170.2", "127.0.0.1", "127.1.2.3", "localhost", "[::1]", "[fe80::1]", "[fd00:ec2::23]"],
)
def test_botocore_takes_no_proxy_to_loopback_and_link_local(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:3128")
    assert aiobotocore.httpsession.ProxyConfiguration().proxy_url_for(f"http://{host}:80/latest/api/token") is None


def test_botocore_takes_the_proxy_to_all_that_no_proxy_does_not_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", "10.0.0.0/8")
    hosts = ("10.1.2.3", "11.1.2.3", "[fd00:ec3::1]", "minio")
    assert [aiobotocore.httpsession.ProxyConfiguration().proxy_url_for(f"http://{host}/a") for host in hosts] == [
        None,
        *["http://proxy:3128"] * 3,
    ]


async def test_a_service_for_credentials_on_loopback_is_asked_without_a_proxy(
    rclone_bucket: Bucket, fault_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def give_keys(asked: Asked, writer: asyncio.StreamWriter) -> None:
        keys = {"AccessKeyId": ACCESS_KEY, "SecretAccessKey": SECRET_KEY, "Token": ""}
        expires = (datetime.now(UTC) + timedelta(hours=6)).strftime("%Y-%m-%dT%H:%M:%SZ")
        writer.write(response(200, json.dumps(keys | {"Expiration": expires}).encode()))

    async with ScriptedServer(_accept) as proxy, ScriptedServer(give_keys) as service:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{service.url}/keys")
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        # A store at such an address may have a proxy; this one has none.
        monkeypatch.setenv("NO_PROXY", fault_proxy.endpoint_url.removeprefix("http://"))
        async with open_store(rclone_bucket.settings(endpoint_url=fault_proxy.endpoint_url)) as store:
            await store.put("a", b"a")
            assert await store.get("a", limit_bytes=1) == b"a"
    assert not proxy.asked
    assert {one.target for one in service.asked} == {"/keys"}
    assert {one.path.rpartition("/")[2] for one in fault_proxy.log} == {"a"}
