"""A server that sends the S3 client elsewhere: it goes nowhere, takes nothing along, and says what was asked of it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from tests.regions import make_file, region_of
from tests.servers.scripted import Asked, ScriptedServer, response
from tests.servers.tls import Certificate

from keepstep_agent.adapters.checksum import crc64nvme, region_checksum
from keepstep_agent.adapters.open_store import open_store
from keepstep_agent.core.errors import ErrorKind, KeepstepError, StoreError
from keepstep_agent.core.settings.values import StoreSettings
from keepstep_agent.ports import ObjectStore

FILE_BYTES = 300_000
REDIRECTS = [300, 301, 302, 303, 304, 305, 307, 308, 399]

Operation = Callable[[ObjectStore, Path], Awaitable[object]]


async def _list(store: ObjectStore, _: Path) -> object:
    return [one async for one in store.list("")]


async def _list_uploads(store: ObjectStore, _: Path) -> object:
    return [one async for one in store.list_uploads("")]


async def _get_into(store: ObjectStore, folder: Path) -> object:
    with (folder / "into").open("wb") as file:
        return await store.get_into("a", offset_bytes=0, size_bytes=9, version="e", descriptor=file.fileno())


async def _put_region(store: ObjectStore, folder: Path) -> None:
    region = region_of(make_file(folder / "file", FILE_BYTES))
    await store.put_data("a", region, region_checksum(region))


async def _put_part(store: ObjectStore, folder: Path) -> object:
    region = region_of(make_file(folder / "file", FILE_BYTES))
    return await store.put_part("a", "upload", 1, region, region_checksum(region))


OPERATIONS: dict[str, Operation] = {
    "put": lambda store, _: store.put("a", b"checkpoint"),
    "put-region": _put_region,
    "put-bytes": lambda store, _: store.put_data("a", bytearray(b"pack"), crc64nvme(b"pack")),
    "create-upload": lambda store, _: store.create_upload("a"),
    "put-part": _put_part,
    "complete-upload": lambda store, _: store.complete_upload("a", "upload", ["e"]),
    "list-parts": lambda store, _: store.list_parts("a", "upload"),
    "list-uploads": _list_uploads,
    "head": lambda store, _: store.head("a"),
    "get": lambda store, _: store.get("a", limit_bytes=100),
    "get-into": _get_into,
    "list": _list,
    "delete": lambda store, _: store.delete("a"),
}


@pytest.fixture
async def elsewhere() -> AsyncIterator[ScriptedServer]:
    """Where nothing may arrive: another host, over plain HTTP."""

    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(response(200, b"<Thanks/>", ETag='"mine"'))

    async with ScriptedServer(answer) as server:
        yield server


class Redirecting(ScriptedServer):
    """Answers every request by `status`, which may be changed, and the same path at `to`."""

    def __init__(self, to: str, status: int, *, body: bytes = b"", certificate: Certificate | None = None) -> None:
        super().__init__(self._redirect, certificate=certificate)
        self.status = status
        self._to = to
        self._body = body

    async def _redirect(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        body = b"" if asked.method == "HEAD" else self._body
        writer.write(response(self.status, body, Location=f"{self._to}{asked.target}"))


def settings(url: str, certificate: Certificate | None = None) -> StoreSettings:
    ca_bundle = str(certificate.certificate) if certificate else ""
    return StoreSettings(destination="s3://bucket/run", endpoint_url=url, ca_bundle=ca_bundle)


@pytest.mark.parametrize("operation", OPERATIONS)
async def test_no_redirect_from_https_to_plain_http_is_followed(
    operation: str,
    elsewhere: ScriptedServer,
    certificate: Certificate,
    s3_environment: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "a-secret-token")
    async with (
        Redirecting(elsewhere.url, 301, certificate=certificate) as server,
        open_store(settings(server.url, certificate)) as store,
    ):
        for server.status in REDIRECTS:
            with pytest.raises(StoreError) as caught:
                await OPERATIONS[operation](store, tmp_path)
            assert f" {server.status}" in str(caught.value)
            assert elsewhere.url in str(caught.value)
            assert f"--endpoint-url (in a pod keepstep.dev/endpoint-url) to {elsewhere.url}" in caught.value.hint
    assert elsewhere.connections == 0


async def test_a_store_that_redirects_fails_its_probe(elsewhere: ScriptedServer, s3_environment: None) -> None:
    async with Redirecting(elsewhere.url, 301) as server, open_store(settings(server.url)) as store:
        with pytest.raises(StoreError, match="301"):
            await store.probe()
    assert elsewhere.connections == 0


async def test_a_proxys_redirect_with_a_page_of_html_says_what_to_set(
    elsewhere: ScriptedServer, s3_environment: None
) -> None:
    page = b"<html><head><title>308 Permanent Redirect</title></head><body><hr>nginx</body></html>"
    async with Redirecting(elsewhere.url, 308, body=page) as server, open_store(settings(server.url)) as store:
        with pytest.raises(StoreError) as caught:
            await store.put("a", b"x")
    assert caught.value.kind is ErrorKind.REQUEST_REFUSED
    assert f"--endpoint-url (in a pod keepstep.dev/endpoint-url) to {elsewhere.url}" in caught.value.hint
    assert elsewhere.connections == 0


async def wrong_region(asked: Asked, writer: asyncio.StreamWriter) -> None:
    """As AWS answers for a bucket of another region; there is no Location."""
    body = (
        b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>PermanentRedirect</Code><Message>The bucket you are '
        b"attempting to access must be addressed using the specified endpoint.</Message>"
        b"<Endpoint>bucket.s3.eu-central-1.amazonaws.com</Endpoint><Bucket>bucket</Bucket></Error>"
    )
    writer.write(response(301, b"" if asked.method == "HEAD" else body, x_amz_bucket_region="eu-central-1"))


async def wrong_signature(asked: Asked, writer: asyncio.StreamWriter) -> None:
    """As AWS answers to a request that is signed for another region."""
    body = (
        b"<Error><Code>AuthorizationHeaderMalformed</Code><Message>the region 'us-east-1' is wrong; expecting "
        b"'eu-central-1'</Message><Region>eu-central-1</Region></Error>"
    )
    writer.write(response(400, b"" if asked.method == "HEAD" else body, x_amz_bucket_region="eu-central-1"))


@pytest.mark.parametrize("operation", ["put", "head", "list", "get"])
@pytest.mark.parametrize("answer", [wrong_region, wrong_signature])
async def test_a_bucket_of_another_region_is_named_and_not_looked_for(
    answer: Callable[[Asked, asyncio.StreamWriter], Awaitable[None]],
    operation: str,
    s3_environment: None,
    tmp_path: Path,
) -> None:
    async with ScriptedServer(answer) as server, open_store(settings(server.url)) as store:
        with pytest.raises(StoreError) as caught:
            await OPERATIONS[operation](store, tmp_path)
        assert len(server.asked) == 1, "one request: none to find the region, none to go there"
    assert caught.value.kind is ErrorKind.REQUEST_REFUSED
    assert "AWS_REGION=eu-central-1" in caught.value.hint


async def test_what_a_redirect_says_reaches_no_terminal_as_it_came(s3_environment: None) -> None:
    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        headers = {"Location": "https://a\x9b2Jb\x7f/", "x_amz_bucket_region": "eu\x9b31m-1"}
        writer.write(response(301, b"<Error><Code>\x1b[2J</Code></Error>", **headers))

    async with ScriptedServer(answer) as server, open_store(settings(server.url)) as store:
        with pytest.raises(StoreError) as caught:
            await store.get("a", limit_bytes=100)
    assert (str(caught.value) + caught.value.hint).isprintable()
    assert "2J" not in str(caught.value) + caught.value.hint


@pytest.mark.parametrize("source", ["ec2", "container", "web-identity"])
async def test_no_fetch_of_credentials_is_redirected_either(
    source: str, elsewhere: ScriptedServer, s3_environment: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "token"
    token.write_text("a-secret-token")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    async with Redirecting(elsewhere.url, 307) as server:
        environment = {
            "ec2": {"AWS_EC2_METADATA_DISABLED": "false", "AWS_EC2_METADATA_SERVICE_ENDPOINT": server.url},
            "container": {
                "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{server.url}/credentials",
                "AWS_CONTAINER_AUTHORIZATION_TOKEN": "a-secret-token",
            },
            "web-identity": {
                "AWS_ROLE_ARN": "arn:aws:iam::1:role/a",
                "AWS_WEB_IDENTITY_TOKEN_FILE": str(token),
                "AWS_ENDPOINT_URL_STS": server.url,
            },
        }[source]
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(KeepstepError):
            async with open_store(settings("http://127.0.0.1:9")) as store:
                await store.put("a", b"x")
        assert server.asked
    assert elsewhere.connections == 0
