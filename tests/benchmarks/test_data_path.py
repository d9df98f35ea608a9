"""The benchmark's own store and watch: what they report is worth no more than they are."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.data_path.build import build
from benchmarks.data_path.certificate import make_certificate
from benchmarks.data_path.process import measure
from benchmarks.data_path.server import Server
from tests.harness.bounds import HANG_SECONDS
from tests.servers.server import ENVIRONMENT, make_client

from keepstep_agent.adapters.open_store import open_store
from keepstep_agent.core.settings.values import StoreSettings
from keepstep_agent.ports import StoreCapabilities

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        shutil.which("cc") is None or not Path("/usr/include/openssl/ssl.h").exists(),
        reason="no C compiler or no headers of OpenSSL",
    ),
]
MIB = 1 << 20


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "a.bin").write_bytes(b"abc" * MIB)
    certificate = make_certificate(tmp_path / "tls")
    program = build(tmp_path).server
    with Server(program, sources=sources, spool=tmp_path / "spool", certificate=certificate) as running:
        yield running


@pytest.mark.parametrize("secure", [False, True])
async def test_to_our_probe_the_store_verifies_checksums_and_keeps_conditions(
    server: Server, secure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    settings = StoreSettings(
        destination="s3://bench/x", endpoint_url=server.endpoint_url(secure=secure), ca_bundle=str(server.ca_bundle)
    )
    async with open_store(settings) as store:
        assert await store.probe() == StoreCapabilities(conditional_put=True, integrity="crc64nvme")


@pytest.mark.parametrize("secure", [False, True])
def test_what_is_kept_in_parts_comes_back_by_ranges_that_cross_them(server: Server, secure: bool) -> None:
    client = make_client(server.endpoint_url(secure=secure), server.ca_bundle)
    target = {"Bucket": "keep", "Key": "big"}
    upload = client.create_multipart_upload(**target)["UploadId"]
    bodies = [b"1" * (5 * MIB) + b"end", b"begin" + b"2" * MIB]
    parts = [
        {
            "PartNumber": number,
            "ETag": client.upload_part(**target, UploadId=upload, PartNumber=number, Body=body)["ETag"],
        }
        for number, body in enumerate(bodies, start=1)
    ]
    client.complete_multipart_upload(**target, UploadId=upload, MultipartUpload={"Parts": parts})
    whole = b"".join(bodies)
    middle = len(bodies[0])
    assert client.get_object(**target)["Body"].read() == whole
    crossing = client.get_object(**target, Range=f"bytes={middle - 3}-{middle + 4}")
    assert crossing["Body"].read() == b"endbegin"
    assert crossing["ContentRange"] == f"bytes {middle - 3}-{middle + 4}/{len(whole)}"
    client.close()


def test_a_listing_of_more_than_a_page_has_every_object_once(server: Server) -> None:
    client = make_client(server.endpoint_url(secure=False), None)
    names = {f"many/{number:04d}" for number in range(1005)}
    for name in names:
        client.put_object(Bucket="bench", Key=name, Body=b"x")
    pages = client.get_paginator("list_objects_v2").paginate(Bucket="bench", Prefix="many/")
    listed = [entry["Key"] for page in pages for entry in page["Contents"]]
    assert len(listed) == len(names)
    assert set(listed) == names
    client.close()


def test_the_counts_say_what_came_and_by_which_check(server: Server) -> None:
    client = make_client(server.endpoint_url(secure=False), None)
    server.reset()
    client.put_object(Bucket="bench", Key="checked", Body=b"x" * MIB, ChecksumAlgorithm="CRC64NVME")
    counts = server.counts()
    assert counts.bodies == 1
    assert counts.requests == 1
    assert MIB < counts.bytes_in < MIB + 4096
    assert "crc64nvme" in counts.check()
    assert server.sizes("checked") == {"checked": MIB}
    client.close()


def test_what_a_process_does_before_its_first_request_is_its_start_up_and_no_transfer(
    server: Server, tmp_path: Path
) -> None:
    program = (
        "import sys, threading, time, urllib.request\n"
        "def burn(seconds):\n"
        "    while time.thread_time() < seconds: pass\n"
        "burn(1.2)\n"
        "urllib.request.urlopen(sys.argv[1], timeout=300).read()\n"
        "burn(1.8)\n"
        "other = threading.Thread(target=burn, args=[0.8])\n"
        "other.start()\n"
        "other.join()\n"
    )
    measurement = measure(
        [sys.executable, "-c", program, f"{server.endpoint_url(secure=False)}/bench/src/a.bin"],
        server=server,
        environment={},
        log=tmp_path / "log",
        timeout_seconds=HANG_SECONDS,
    )
    assert measurement.counts.requests == 1
    assert measurement.start_cpu_seconds == pytest.approx(1.2, abs=0.25)
    assert measurement.main_thread_cpu_seconds == pytest.approx(0.6, abs=0.25)
    assert measurement.cpu_seconds == pytest.approx(1.4, abs=0.25)
