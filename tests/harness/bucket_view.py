"""What a bucket really holds, seen with boto3's eyes and through our own command line, as an operator would look."""

import json
from pathlib import Path
from typing import Any

from tests.harness.warm_python import keepstep
from tests.servers.server import Bucket


def step_of(marker: str) -> int:
    """Return the step that the key of a commit marker stands for: keys count down, so that the newest come first."""
    return 10**12 - 1 - int(marker.rpartition("/")[2].partition(".")[0])


class BucketView:
    """Looks past every proxy, straight at the server of `bucket`."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._client = bucket.client()

    def keys(self, prefix: str = "") -> list[str]:
        """Keys below the destination, without its prefix."""
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket.name, Prefix=f"{self._bucket.prefix}/{prefix}"
        )
        found = [item["Key"] for page in pages for item in page.get("Contents", [])]
        return [key.removeprefix(f"{self._bucket.prefix}/") for key in found]

    def markers(self) -> list[str]:
        """Keys of the commit markers, oldest step first."""
        return sorted(self.keys(".keepstep/commits/"), reverse=True)

    def steps(self) -> list[int]:
        """Return the committed steps, oldest first."""
        return [step_of(key) for key in self.markers()]

    def read(self, key: str) -> bytes:
        answer = self._client.get_object(Bucket=self._bucket.name, Key=f"{self._bucket.prefix}/{key}")
        body: bytes = answer["Body"].read()
        return body

    def flip(self, key: str, position: int) -> None:
        """Change one byte behind everybody's back, as a bad disk would: same size, same name."""
        content = bytearray(self.read(key))
        content[position] ^= 1
        self._client.put_object(Bucket=self._bucket.name, Key=f"{self._bucket.prefix}/{key}", Body=bytes(content))

    def delete(self, key: str) -> None:
        self._client.delete_object(Bucket=self._bucket.name, Key=f"{self._bucket.prefix}/{key}")

    def uploads(self) -> list[str]:
        """Keys of multipart uploads that are neither completed nor aborted."""
        answer = self._client.list_multipart_uploads(Bucket=self._bucket.name)
        return [upload["Key"] for upload in answer.get("Uploads", [])]

    def verify(self) -> list[dict[str, Any]]:
        """`keepstep verify --all`: one row per committed checkpoint, every byte read back."""
        answer = json.loads(self._keepstep("verify", "--all", "--json"))
        checkpoints: list[dict[str, Any]] = answer["checkpoints"]
        return checkpoints

    def restore(self, volume: Path) -> Path:
        """`keepstep restore` into a volume; where the checkpoint lies then."""
        answer = json.loads(self._keepstep("restore", "--volume", str(volume), "--json"))
        (restored,) = answer["restored"]
        return Path(restored["path"])

    def _keepstep(self, command: str, *arguments: str) -> str:
        """Its standard output; AssertionError with its standard error if it fails."""
        ended = keepstep(
            command,
            self._bucket.destination,
            f"--endpoint-url={self._bucket.endpoint_url}",
            *arguments,
        )
        assert not ended.returncode, ended.stdout + ended.stderr
        return ended.stdout
