"""A sidecar as one writes it in an afternoon: it uploads the checkpoints it is told of, one after the other, by boto3.

    python -m benchmarks.plain_uploader fifo|lifo ENDPOINT PREFIX PART_BYTES CONNECTIONS

Each line of its input is a checkpoint's directory. `fifo` takes the oldest first, `lifo` the newest; neither lets go of
the one it has begun. Objects are bench/<PREFIX>/<directory's name>/<file's name>, the last one is `committed`.
"""

import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any, Final

import boto3
from boto3.s3.transfer import TransferConfig, create_transfer_manager
from botocore.config import Config

BUCKET: Final = "bench"
MARKER: Final = "committed"


def main() -> None:
    order, endpoint_url, prefix, part_bytes, connections = sys.argv[1:]
    client = boto3.client(
        "s3",
        endpoint_url=endpoint_url,
        region_name="us-east-1",
        # Its cheapest way: no checksum, and no SHA-256 of what is sent.
        config=Config(
            max_pool_connections=int(connections),
            request_checksum_calculation="when_required",
            s3={"addressing_style": "path", "payload_signing_enabled": False},
        ),
    )
    transfer = TransferConfig(
        multipart_threshold=int(part_bytes),
        multipart_chunksize=int(part_bytes),
        max_concurrency=int(connections),
        preferred_transfer_client="classic",
    )
    waiting: deque[Path] = deque()
    told = threading.Semaphore(0)
    threading.Thread(target=_upload_all, args=(order, client, prefix, transfer, waiting, told), daemon=True).start()
    print("ready", flush=True)
    for line in sys.stdin:
        waiting.append(Path(line.strip()))
        told.release()


def _upload_all(
    order: str,
    client: Any,
    prefix: str,
    transfer: TransferConfig,
    waiting: deque[Path],
    told: threading.Semaphore,
) -> None:
    manager = create_transfer_manager(client, transfer)
    while True:
        told.acquire()
        directory = waiting.popleft() if order == "fifo" else waiting.pop()
        place = f"{prefix}/{directory.name}"
        uploads = [manager.upload(str(file), BUCKET, f"{place}/{file.name}") for file in sorted(directory.iterdir())]
        for upload in uploads:
            upload.result()
        client.put_object(Bucket=BUCKET, Key=f"{place}/{MARKER}", Body=b"{}")


if __name__ == "__main__":
    main()
