"""One library's transfer of a folder, as a program: what somebody who uses that library would write.

    … library_peer WAY upload|download ENDPOINT CA_BUNDLE PREFIX FOLDER PART_BYTES CONNECTIONS

Objects are bench/<PREFIX>/<file name>. `-tuned` takes the part size and the number of connections that all tuned tools
get; the plain name takes the library's defaults. It leaves by os._exit, so that no interpreter's end is measured.
"""

import os
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

BUCKET: Final = "bench"
REGION: Final = "us-east-1"
_FEW_FILES: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    tuned: bool
    checked: bool
    upload: bool
    endpoint_url: str
    ca_bundle: str
    prefix: str
    folder: Path
    part_bytes: int
    connections: int

    @property
    def secure(self) -> bool:
        return self.endpoint_url.startswith("https:")

    def key(self, name: str) -> str:
        return f"{self.prefix}/{name}"


def boto3(order: Order) -> None:
    import boto3
    from boto3.s3.transfer import TransferConfig
    from botocore.config import Config

    transfer, extra = TransferConfig(preferred_transfer_client="classic"), {}
    config = Config(max_pool_connections=max(10, order.connections))
    if order.tuned:
        # A thread of its own moves each part; one file at a time gets them all.
        transfer = TransferConfig(
            multipart_threshold=order.part_bytes,
            multipart_chunksize=order.part_bytes,
            max_concurrency=order.connections,
            preferred_transfer_client="classic",
        )
        # botocore's cheapest way that the store can verify: no SHA-256 of the payload, CRC64NVME by awscrt.
        config = config.merge(Config(s3={"payload_signing_enabled": False}))
        extra = {"ChecksumAlgorithm": "CRC64NVME"}
    if not order.checked:
        config = config.merge(Config(request_checksum_calculation="when_required"))
        extra = {}
    client = boto3.client(
        "s3", endpoint_url=order.endpoint_url, verify=order.ca_bundle, config=config, region_name=REGION
    )
    names = _names(client.list_objects_v2, order)

    def move(name: str) -> None:
        path = str(order.folder / name)
        if order.upload:
            client.upload_file(path, BUCKET, order.key(name), Config=transfer, ExtraArgs=extra)
        else:
            client.download_file(BUCKET, order.key(name), path, Config=transfer)

    _for_each(move, names, order)


def _names(list_objects: Callable[..., Any], order: Order) -> list[str]:
    if order.upload:
        return sorted(path.name for path in order.folder.iterdir())
    names: list[str] = []
    token: dict[str, str] = {}
    while True:
        page = list_objects(Bucket=BUCKET, Prefix=f"{order.prefix}/", **token)
        names += [entry["Key"].rpartition("/")[2] for entry in page["Contents"]]
        if not page["IsTruncated"]:
            return names
        token = {"ContinuationToken": page["NextContinuationToken"]}


def obstore(order: Order) -> None:
    import obstore
    from obstore.store import S3Store

    checks: dict[str, Any] = {}
    if order.tuned:
        checks = {"unsigned_payload": True, **({"checksum_algorithm": "crc64nvme"} if order.checked else {})}
    store = S3Store(
        BUCKET,
        endpoint=order.endpoint_url,
        region=REGION,
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
        **checks,
    )
    found = [meta for page in obstore.list(store, order.prefix) for meta in page]
    sizes = {meta["path"].rpartition("/")[2]: meta["size"] for meta in found}
    names = sorted(path.name for path in order.folder.iterdir()) if order.upload else sorted(sizes)
    at_once = _FEW_FILES if len(names) <= _FEW_FILES else order.connections
    options: dict[str, Any] = {}
    if order.tuned:
        options = {"chunk_size": order.part_bytes, "max_concurrency": max(1, order.connections // at_once)}

    def put(name: str) -> None:
        obstore.put(store, order.key(name), order.folder / name, **options)

    def get(name: str) -> None:
        with (order.folder / name).open("wb") as file:
            for piece in obstore.get(store, order.key(name)):
                file.write(piece)

    def get_range(part: tuple[int, str, int]) -> None:
        descriptor, name, offset = part
        size = min(order.part_bytes, sizes[name] - offset)
        os.pwrite(descriptor, obstore.get_range(store, order.key(name), start=offset, length=size), offset)

    with ThreadPoolExecutor(order.connections if order.tuned else at_once) as threads:
        if order.upload:
            list(threads.map(put, names))
        elif not order.tuned or max(sizes.values()) <= order.part_bytes:
            list(threads.map(get, names))
        else:
            parts = []
            for name in names:
                descriptor = os.open(order.folder / name, os.O_WRONLY | os.O_CREAT)
                os.posix_fallocate(descriptor, 0, sizes[name])
                parts += [(descriptor, name, offset) for offset in range(0, sizes[name], order.part_bytes)]
            list(threads.map(get_range, parts))


def awscrt(order: Order) -> None:
    from urllib.parse import urlsplit

    import awscrt.s3 as crt
    from awscrt.auth import AwsCredentialsProvider
    from awscrt.http import HttpHeaders, HttpRequest
    from awscrt.io import ClientTlsContext, TlsContextOptions

    options: dict[str, Any] = {"part_size": order.part_bytes} if order.tuned else {}
    if order.secure:
        tls = TlsContextOptions()
        tls.override_default_trust_store_from_path(None, order.ca_bundle)
        options["tls_connection_options"] = ClientTlsContext(tls).new_connection_options()
    credentials = AwsCredentialsProvider.new_static(
        os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
    )
    client = crt.S3Client(
        region=REGION,
        tls_mode=crt.S3RequestTlsMode.ENABLED if order.secure else crt.S3RequestTlsMode.DISABLED,
        signing_config=crt.create_default_s3_signing_config(region=REGION, credential_provider=credentials),
        **options,
    )
    host = urlsplit(order.endpoint_url).netloc
    checksum = crt.S3ChecksumConfig(
        algorithm=crt.S3ChecksumAlgorithm.CRC64NVME, location=crt.S3ChecksumLocation.TRAILER
    )

    def request(name: str) -> Any:
        headers = HttpHeaders([("Host", host)])
        path = order.folder / name
        target = f"/{BUCKET}/{order.key(name)}"
        if order.upload:
            headers.add("Content-Length", str(path.stat().st_size))
            return client.make_request(
                type=crt.S3RequestType.PUT_OBJECT,
                request=HttpRequest("PUT", target, headers),
                send_filepath=str(path),
                checksum_config=checksum if order.checked else None,
            )
        return client.make_request(
            type=crt.S3RequestType.GET_OBJECT, request=HttpRequest("GET", target, headers), recv_filepath=str(path)
        )

    names = sorted(path.name for path in order.folder.iterdir()) if order.upload else _given_names(order)
    for outstanding in [request(name) for name in names]:
        outstanding.finished_future.result(timeout=600)


def _given_names(order: Order) -> list[str]:
    """Neither awscrt nor s3torchconnector's checkpoints list: who uses them knows the names."""
    return Path(os.environ["BENCH_NAMES"]).read_text().split()


def s3torchconnector(order: Order) -> None:
    from s3torchconnector import S3Checkpoint, S3ClientConfig

    options: dict[str, Any] = {"part_size": order.part_bytes} if order.tuned else {}
    checkpoint = S3Checkpoint(
        region=REGION, endpoint=order.endpoint_url, s3client_config=S3ClientConfig(force_path_style=True, **options)
    )
    names = sorted(path.name for path in order.folder.iterdir()) if order.upload else _given_names(order)

    def move(name: str) -> None:
        uri = f"s3://{BUCKET}/{order.key(name)}"
        if order.upload:
            with checkpoint.writer(uri) as writer, (order.folder / name).open("rb") as file:
                shutil.copyfileobj(file, writer, 1 << 20)
        else:
            with checkpoint.reader(uri) as reader, (order.folder / name).open("wb") as file:
                shutil.copyfileobj(reader, file, 1 << 20)

    _for_each(move, names, order)


def _for_each(move: Callable[[str], None], names: list[str], order: Order) -> None:
    """A few large files one by one, since the library has threads for their parts; many small ones side by side."""
    with ThreadPoolExecutor(order.connections if len(names) > _FEW_FILES else 1) as threads:
        list(threads.map(move, names))


WAYS: Final[dict[str, Callable[[Order], None]]] = {
    "boto3": boto3,
    "obstore": obstore,
    "awscrt": awscrt,
    "s3torchconnector": s3torchconnector,
}


def main() -> None:
    way, direction, endpoint_url, ca_bundle, prefix, folder, part_bytes, connections = sys.argv[1:]
    library, _, flavour = way.partition("-")
    order = Order(
        tuned=flavour.startswith("tuned"),
        checked=not flavour.endswith("unchecked"),
        upload=direction == "upload",
        endpoint_url=endpoint_url,
        ca_bundle=ca_bundle,
        prefix=prefix,
        folder=Path(folder),
        part_bytes=int(part_bytes),
        connections=int(connections),
    )
    WAYS[library](order)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
