"""Keys that their owner replaces while the store is open: each request is made with those that the store takes."""

import asyncio
import json
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from tests.adapters.s3_faults.store_calls import OPERATIONS, fails
from tests.harness.bounds import HANG_SECONDS
from tests.harness.credentials_file import FIRST_KEYS, NEXT_KEYS, refuse_first_keys, write_credentials
from tests.lanes import nightly
from tests.podsim.volumes import write_atomically
from tests.regions import make_file, parts_of, region_of
from tests.servers.fault_proxy import FaultProxy
from tests.servers.faults import Fault, Rule
from tests.servers.rclone import RcloneServer
from tests.servers.scripted import Asked, ScriptedServer, response
from tests.servers.server import ACCESS_KEY, NEXT_ACCESS_KEY, SECRET_KEY, Bucket
from tests.servers.tls import Certificate

from keepstep_agent.adapters.checksum import region_checksum
from keepstep_agent.adapters.open_store import open_store
from keepstep_agent.adapters.s3 import credentials, renewal
from keepstep_agent.core.errors import ErrorKind, KeepstepError, StoreError

MIB = 1024 * 1024
REFUSALS = {
    "unknown key": (403, b"<Error><Code>InvalidAccessKeyId</Code></Error>"),
    "wrong secret": (403, b"<Error><Code>SignatureDoesNotMatch</Code></Error>"),
    "expired": (400, b"<Error><Code>ExpiredToken</Code></Error>"),
    "to be renewed": (400, b"<Error><Code>TokenRefreshRequired</Code></Error>"),
    "denied": (403, b"<Error><Code>AccessDenied</Code></Error>"),
    "without a body": (403, b""),
    "unauthorized": (401, b""),
}


@pytest.fixture(autouse=True)
def no_keys_in_the_environment(s3_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in FIRST_KEYS:
        monkeypatch.delenv(name)


@pytest.fixture(params=["http", "https"])
def proxy(
    request: pytest.FixtureRequest, rclone_server: RcloneServer, certificate: Certificate
) -> Iterator[FaultProxy]:
    made = FaultProxy(rclone_server.port, certificate=certificate if request.param == "https" else None)
    made.start()
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture
def bucket(rclone_bucket: Bucket, proxy: FaultProxy, certificate: Certificate) -> Bucket:
    authority = certificate.certificate if proxy.endpoint_url.startswith("https:") else None
    return replace(rclone_bucket, endpoint_url=proxy.endpoint_url, ca_bundle=authority)


@pytest.mark.parametrize("operation", OPERATIONS)
async def test_a_refused_request_is_made_again_with_the_keys_that_the_secret_has_then(
    operation: str, bucket: Bucket, proxy: FaultProxy, tmp_path: Path
) -> None:
    write_atomically(tmp_path / "s", FIRST_KEYS)
    region = region_of(make_file(tmp_path / "f", 6 * MIB))
    async with open_store(bucket.settings(credentials_directory=str(tmp_path / "s"))) as store:
        await store.put("a", b"x")
        version = (await store.head("a")).version
        upload = await store.create_upload("up")
        proxy.log.clear()
        refuse_first_keys(proxy)
        write_atomically(tmp_path / "s", NEXT_KEYS)
        await OPERATIONS[operation](store, region, upload, version)
        assert proxy.hits("old") == 1
        assert {request.access_key for request in proxy.log[1:]} == {NEXT_ACCESS_KEY}


@pytest.mark.parametrize("refusal", REFUSALS)
@pytest.mark.parametrize("proxy", ["http"], indirect=True)
async def test_whatever_a_store_says_to_old_keys_new_ones_are_looked_for(
    refusal: str, bucket: Bucket, proxy: FaultProxy, tmp_path: Path
) -> None:
    write_atomically(tmp_path / "s", FIRST_KEYS)
    async with open_store(bucket.settings(credentials_directory=str(tmp_path / "s"))) as store:
        await store.put("a", b"x")
        status, body = REFUSALS[refusal]
        proxy.log.clear()
        refuse_first_keys(proxy, status=status, body=body)
        write_atomically(tmp_path / "s", NEXT_KEYS)
        assert (await store.head("a")).size_bytes == 1
        assert [request.status for request in proxy.log] == [status, 200]


@pytest.mark.parametrize("server", ["rclone", "rclone_tls", *nightly("seaweed"), *nightly("ceph")])
@pytest.mark.parametrize("wrong", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
async def test_what_a_real_store_refuses_is_sent_again_whole(
    wrong: str, server: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    bucket: Bucket = request.getfixturevalue(f"{server}_bucket")
    write_atomically(tmp_path / "s", {**FIRST_KEYS, wrong: "replaced"})
    original = make_file(tmp_path / "f", 8 * MIB)
    region = region_of(original)
    async with open_store(bucket.settings(credentials_directory=str(tmp_path / "s"))) as store:
        await fails(ErrorKind.ACCESS_DENIED, store.put_data("a", region, region_checksum(region)))
        write_atomically(tmp_path / "s", FIRST_KEYS)
        await store.put_data("a", region, region_checksum(region))
        assert await store.get("a", limit_bytes=8 * MIB) == original.read_bytes()


@pytest.mark.parametrize("proxy", ["http"], indirect=True)
async def test_with_the_same_keys_a_refused_request_is_not_made_again(
    bucket: Bucket, proxy: FaultProxy, tmp_path: Path
) -> None:
    write_atomically(tmp_path / "s", FIRST_KEYS)
    async with open_store(bucket.settings(credentials_directory=str(tmp_path / "s"))) as store:
        proxy.log.clear()
        refuse_first_keys(proxy)
        await fails(ErrorKind.ACCESS_DENIED, store.put("a", b"x"))
        assert len(proxy.log) == 1


@pytest.mark.parametrize("proxy", ["http"], indirect=True)
async def test_a_store_that_refuses_the_new_keys_too_is_asked_twice(
    bucket: Bucket, proxy: FaultProxy, tmp_path: Path
) -> None:
    write_atomically(tmp_path / "s", FIRST_KEYS)
    async with open_store(bucket.settings(credentials_directory=str(tmp_path / "s"))) as store:
        await store.put("a", b"x")
        proxy.log.clear()
        proxy.add(Rule(name="all", fault=Fault.STATUS, status=403, times=-1))
        write_atomically(tmp_path / "s", NEXT_KEYS)
        await fails(ErrorKind.ACCESS_DENIED, store.put("a", b"x"))
        assert [request.access_key for request in proxy.log] == [ACCESS_KEY, NEXT_ACCESS_KEY]


async def test_an_upload_in_parts_goes_on_with_other_keys(bucket: Bucket, proxy: FaultProxy, tmp_path: Path) -> None:
    write_atomically(tmp_path / "s", FIRST_KEYS)
    original = make_file(tmp_path / "f", 23 * MIB)
    async with open_store(bucket.settings(credentials_directory=str(tmp_path / "s"))) as store:
        upload = await store.create_upload("a")
        (region, checksum), *rest = parts_of(original, 5 * MIB)
        receipts = [await store.put_part("a", upload, 1, region, checksum)]
        proxy.log.clear()
        refuse_first_keys(proxy)
        write_atomically(tmp_path / "s", NEXT_KEYS)
        # All are refused at the same time, and find the new keys together.
        parts = (store.put_part("a", upload, number, *part) for number, part in enumerate(rest, start=2))
        receipts += await asyncio.gather(*parts)
        await store.complete_upload("a", upload, receipts)
        assert proxy.hits("old") == len(rest)
        assert await store.get("a", limit_bytes=24 * MIB) == original.read_bytes()


@pytest.mark.parametrize("proxy", ["http"], indirect=True)
async def test_new_keys_count_soon_also_where_the_store_takes_the_old_ones(
    bucket: Bucket, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renewal, "LOOK_SECONDS", 0.0)
    write_atomically(tmp_path / "s", FIRST_KEYS)
    async with open_store(bucket.settings(credentials_directory=str(tmp_path / "s"))) as store:
        await store.put("a", b"x")
        write_atomically(tmp_path / "s", NEXT_KEYS)
        while proxy.log[-1].access_key == ACCESS_KEY:
            await store.put("a", b"x")
        assert {request.status for request in proxy.log} == {200}


@pytest.mark.parametrize("proxy", ["http"], indirect=True)
async def test_a_rewritten_credentials_file_counts_for_the_next_request(
    bucket: Bucket, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    write_credentials(tmp_path / "credentials", FIRST_KEYS)
    async with open_store(bucket.settings()) as store:
        await store.put("a", b"x")
        proxy.log.clear()
        refuse_first_keys(proxy)
        write_credentials(tmp_path / "credentials", NEXT_KEYS)
        await store.put("a", b"y")
        assert [request.access_key for request in proxy.log] == [ACCESS_KEY, NEXT_ACCESS_KEY]


@pytest.mark.parametrize("proxy", ["http"], indirect=True)
async def test_a_store_that_was_opened_without_keys_finds_them_once_written(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renewal, "LOOK_SECONDS", 0.0)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    async with open_store(bucket.settings()) as store:
        await fails(ErrorKind.ACCESS_DENIED, store.put("a", b"x"))
        write_credentials(tmp_path / "credentials", FIRST_KEYS)
        stored = False
        async with asyncio.timeout(HANG_SECONDS):
            while not stored:
                with suppress(StoreError):
                    await store.put("a", b"x")
                    stored = True


@pytest.mark.parametrize("proxy", ["http"], indirect=True)
async def test_a_program_that_gives_keys_is_asked_again_at_a_refusal_and_not_at_each(
    bucket: Bucket, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = tmp_path / "answer.json"

    def give(keys: dict[str, str]) -> None:
        access_key, secret_key = keys.values()
        answer.write_text(json.dumps({"Version": 1, "AccessKeyId": access_key, "SecretAccessKey": secret_key}))

    program = tmp_path / "program.py"
    program.write_text(f"print(open({str(answer)!r}).read()); open({str(tmp_path / 'runs')!r}, 'a').write('x')")
    command = shlex.join([sys.executable, str(program)])
    (tmp_path / "config").write_text(f"[default]\ncredential_process = {command}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    give(FIRST_KEYS)
    async with open_store(bucket.settings()) as store:
        await store.put("a", b"x")
        proxy.log.clear()
        refuse_first_keys(proxy)
        give(NEXT_KEYS)
        await store.put("a", b"y")
        assert [request.access_key for request in proxy.log] == [ACCESS_KEY, NEXT_ACCESS_KEY]
        proxy.add(Rule(name="all", fault=Fault.STATUS, status=403, times=-1))
        for _ in range(3):
            await fails(ErrorKind.ACCESS_DENIED, store.put("a", b"y"))
    assert (tmp_path / "runs").read_text() == "xx"


@pytest.mark.parametrize("proxy", ["http"], indirect=True)
async def test_a_credential_process_that_hangs_holds_a_request_for_a_bounded_time(
    bucket: Bucket, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credentials, "_FIND_SECONDS", 2.0)
    answer = {"Version": 1, "AccessKeyId": ACCESS_KEY, "SecretAccessKey": SECRET_KEY}
    program = tmp_path / "program.py"
    program.write_text(f"print({json.dumps(answer)!r})")
    command = shlex.join([sys.executable, str(program)])
    (tmp_path / "config").write_text(f"[default]\ncredential_process = {command}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    with capture_logs() as logs:
        async with open_store(bucket.settings()) as store:
            started = tmp_path / "started"
            program.write_text(
                f"import os, time; open({str(started)!r}, 'a').write(f'{{os.getpid()}}\\n'); time.sleep(600)"
            )
            proxy.add(Rule(name="all", fault=Fault.STATUS, status=403, times=-1))
            async with asyncio.timeout(HANG_SECONDS):
                await fails(ErrorKind.ACCESS_DENIED, store.put("a", b"x"))
        with pytest.raises(KeepstepError, match="gave no credentials in 2 s"):
            async with open_store(bucket.settings()):
                pass
    assert [line["error"] for line in logs if line["event"] == "credentials.unusable"] == [
        "the AWS chain gave no credentials in 2 s"
    ]
    pids = started.read_text().split()
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


@pytest.mark.parametrize("proxy", ["http"], indirect=True)
@pytest.mark.parametrize(
    "change",
    [
        lambda directory: write_atomically(directory, {"AWS_ACCESS_KEY_ID": "half"}),
        lambda directory: write_atomically(directory, {}),
        lambda directory: (directory / "..data").unlink(),
    ],
    ids=["half", "empty", "gone"],
)
async def test_a_secret_that_is_not_whole_changes_no_keys_and_is_said_once(
    change: object, bucket: Bucket, proxy: FaultProxy, tmp_path: Path
) -> None:
    assert callable(change)
    write_atomically(tmp_path / "s", FIRST_KEYS)
    async with open_store(bucket.settings(credentials_directory=str(tmp_path / "s"))) as store:
        await store.put("a", b"x")
        proxy.log.clear()
        refuse_first_keys(proxy)
        change(tmp_path / "s")
        with capture_logs() as logs:
            for _ in range(2):
                await fails(ErrorKind.ACCESS_DENIED, store.put("a", b"x"))
        assert [line["event"] for line in logs] == ["credentials.unusable"]
        assert SECRET_KEY not in str(logs)
        proxy.clear()
        await store.put("a", b"x")
        proxy.log.clear()
        refuse_first_keys(proxy)
        write_atomically(tmp_path / "s", NEXT_KEYS)
        await store.put("a", b"x")


@pytest.mark.parametrize("proxy", ["http"], indirect=True)
async def test_a_credentials_file_that_is_gone_or_broken_leaves_the_keys_as_they_are(
    bucket: Bucket, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    write_credentials(path, FIRST_KEYS)
    async with open_store(bucket.settings()) as store:
        await store.put("a", b"x")
        for content in (None, b"[default", b"[default]\naws_access_key_id = half\n"):
            path.unlink(missing_ok=True) if content is None else path.write_bytes(content)
            proxy.log.clear()
            refuse_first_keys(proxy)
            with capture_logs() as logs:
                await fails(ErrorKind.ACCESS_DENIED, store.put("a", b"x"))
            assert [line["event"] for line in logs] == ["credentials.unusable"]
            proxy.clear()
            await store.put("a", b"x")
        proxy.log.clear()
        refuse_first_keys(proxy)
        write_credentials(path, NEXT_KEYS)
        await store.put("a", b"x")


@pytest.mark.parametrize("proxy", ["http"], indirect=True)
async def test_an_endpoint_that_the_secret_names_later_counts_from_the_next_start_on(
    bucket: Bucket, proxy: FaultProxy, tmp_path: Path
) -> None:
    write_atomically(tmp_path / "s", {**FIRST_KEYS, "endpoint": bucket.endpoint_url})
    settings = bucket.settings(endpoint_url="", credentials_directory=str(tmp_path / "s"))
    async with open_store(settings) as store:
        await store.put("a", b"x")
        proxy.log.clear()
        refuse_first_keys(proxy)
        write_atomically(tmp_path / "s", {**NEXT_KEYS, "endpoint": "http://127.0.0.1:1"})
        with capture_logs() as logs:
            await store.put("a", b"x")
        assert [line["event"] for line in logs] == ["credentials.renewed", "credentials.other_store"]


@pytest.mark.parametrize("proxy", ["http"], indirect=True)
async def test_a_look_at_files_that_hangs_holds_up_no_request(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a home directory whose server is gone."""
    release = asyncio.Event()
    loop = asyncio.get_running_loop()
    write_atomically(tmp_path / "s", FIRST_KEYS)
    async with open_store(bucket.settings(credentials_directory=str(tmp_path / "s"))) as store:
        monkeypatch.setattr(renewal, "LOOK_SECONDS", 0.0)
        hung = asyncio.Event()

        def hang(_: str) -> credentials.SecretKeys:
            loop.call_soon_threadsafe(hung.set)
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result(HANG_SECONDS)
            return credentials.SecretKeys()

        monkeypatch.setattr(credentials, "read_secret", hang)
        try:
            while not hung.is_set():
                await store.put("a", b"x")
            await store.put("a", b"x")
        finally:
            release.set()


async def test_botocore_sends_the_token_that_its_file_holds_each_time_it_renews(
    rclone_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As EKS Pod Identity has it: kubelet replaces the token every hour."""

    async def give(asked: Asked, writer: asyncio.StreamWriter) -> None:
        # So near its end that each request renews.
        ends_at = (datetime.now(UTC) + timedelta(minutes=5)).strftime("%Y-%m-%dT%H:%M:%SZ")
        keys = {"AccessKeyId": ACCESS_KEY, "SecretAccessKey": SECRET_KEY, "Token": "", "Expiration": ends_at}
        writer.write(response(200, json.dumps(keys).encode(), Content_Type="application/json"))

    write_atomically(tmp_path / "t", {"token": "first"})
    async with ScriptedServer(give) as server:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{server.url}/keys")
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "t/token"))
        async with open_store(rclone_bucket.settings()) as store:
            await store.put("a", b"x")
            write_atomically(tmp_path / "t", {"token": "second"})
            await store.put("a", b"x")
        tokens = [asked.headers["authorization"] for asked in server.asked]
        assert (tokens[0], tokens[-1]) == ("first", "second")
