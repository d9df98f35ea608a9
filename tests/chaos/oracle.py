"""Judges the bucket without any code of Keepstep's: plain S3 reads, JSON, tar offsets, and the bytes to be there.

It knows from the trainers which attempt and step a save id belongs to, and from `content` what they wrote. What it sees
while a server dies proves nothing: a suspicion counts when it is seen again and again, with the marker still there.
"""

import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import boto3
import botocore.client
from awscrt import checksums
from botocore.exceptions import BotoCoreError, ClientError
from tests.chaos.content import checkpoint_files
from tests.chaos.report import Loss, Report
from tests.harness.bucket_view import step_of
from tests.servers.faults import Request
from tests.servers.server import ACCESS_KEY, SECRET_KEY, Bucket

_MARKER: Final = re.compile(r"/\.keepstep/commits/(\d{12,})\.(.+)\.json")
_LOOK_SECONDS: Final = 1.0
_LOOKS: Final = 4
_READ_SECONDS: Final = 20.0


def markers_read(requests: Sequence[Request]) -> set[str]:
    """Saves whose marker the store has given to somebody: prune may have deleted it between two looks of the oracle."""
    given = (request.path for request in requests if request.method == "GET" and request.status == 200)
    return {match[2] for path in given if (match := _MARKER.search(path))}


class UnansweredError(Exception):
    """The server gave no answer that means anything."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Marker:
    """A commit marker by its key."""

    step: int
    save: str
    key: str


@dataclass(slots=True)
class Truth:
    """What the trainers say: `begun` has each save's attempt and step, `acknowledged` the ranks whose agent has it.

    `excused`: saves whose files went with a node's disk.
    """

    run: str
    world_size: int
    begun: dict[str, tuple[str, int]] = field(default_factory=dict)
    acknowledged: dict[str, set[int]] = field(default_factory=dict)
    excused: set[str] = field(default_factory=set)

    def files(self, save: str) -> dict[str, bytes] | None:
        """Every byte of a save; None if nobody has begun it."""
        if save not in self.begun:
            return None
        attempt, step = self.begun[save]
        return checkpoint_files(self.run, attempt, step, self.world_size)

    def owed(self) -> set[str]:
        """Saves that all ranks' agents have acknowledged and still can have."""
        return {save for save, ranks in self.acknowledged.items() if len(ranks) == self.world_size} - self.excused


class Oracle:
    """`look` as often as one likes; `watch` does it in a thread of its own until `close`."""

    def __init__(self, bucket: Bucket, truth: Truth, report: Report, *, keep_last: int) -> None:
        self.present: dict[str, Marker] = {}
        """Markers of the last listing, by key."""
        self.ever: set[str] = set()
        """Saves that were ever seen committed."""
        self._truth = truth
        self._report = report
        self._keep_last = keep_last
        self._bucket = bucket
        self._client = boto3.client(
            "s3",
            endpoint_url=bucket.endpoint_url,
            region_name="us-east-1",
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            config=botocore.client.Config(
                s3={"addressing_style": "path"},
                connect_timeout=_READ_SECONDS,
                read_timeout=_READ_SECONDS,
                retries={"total_max_attempts": 1},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )
        self._verified: set[str] = set()
        self._lost: set[str] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="chaos-oracle", daemon=True)

    def watch(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def newest_step(self) -> int:
        """Of the committed checkpoints of the last look; -1 when there was none."""
        return max((marker.step for marker in list(self.present.values())), default=-1)

    def committed(self) -> set[str]:
        """Saves whose markers are there now. Raises UnansweredError."""
        return {marker.save for marker in self._markers().values()}

    def look(self, *, again: bool = False) -> None:
        """List, judge what has vanished, and read what is new; with `again` read everything. Raises UnansweredError."""
        listed = self._markers()
        for key, marker in list(self.present.items()):
            if key not in listed and key not in self._lost:
                self._judge_vanished(marker)
        self.present = listed
        for key, marker in sorted(listed.items()):
            if marker.save not in self.ever:
                self.ever.add(marker.save)
                self._report.count("checkpoints committed")
            if again or key not in self._verified:
                self._judge_marker(marker)

    def problem(self, marker: Marker) -> str:
        """What is wrong with a committed checkpoint, every byte read; empty if nothing. Raises UnansweredError."""
        expected = self._truth.files(marker.save)
        if expected is None:
            return f"nobody has begun save {marker.save}"
        value = json.loads(self._read(marker.key))
        if (value["save"], value["step"]) != (marker.save, self._truth.begun[marker.save][1]):
            return f"the marker speaks of save {value['save']}, step {value['step']}"
        prefix = f"{self._bucket.prefix}/{value['name']}/{value['save']}/"
        stored: dict[str, bytes] = {}
        ranks: list[int] = []
        for reference in value["manifests"]:
            key = f"{prefix}.keepstep/manifest-{reference['first_rank']:05d}-{reference['rank_count']:05d}.json"
            body = self._read(key)
            if (len(body), f"{checksums.crc64nvme(body):016x}") != (reference["size"], reference["checksum"]):
                return f"{key} is not what the marker says"
            for rank in json.loads(body)["ranks"]:
                ranks.append(rank["rank"])
                stored |= self._files_of(rank, prefix)
        if sorted(ranks) != list(range(self._truth.world_size)):
            return f"the manifests have ranks {sorted(ranks)}"
        if stored.keys() != expected.keys():
            return f"files differ: {sorted(stored.keys() ^ expected.keys())}"
        wrong = [path for path in expected if stored[path] != expected[path]]
        return f"wrong bytes in {wrong}" if wrong else ""

    def _files_of(self, manifest: Mapping[str, Any], prefix: str) -> dict[str, bytes]:
        packs = [
            self._read(f"{prefix}.keepstep/pack-{manifest['rank']:05d}-{number:05d}.tar")
            for number in range(len(manifest.get("packs", [])))
        ]
        found = {}
        for file in manifest["files"]:
            if "pack" in file:
                offset = file["offset"]
                found[file["path"]] = packs[file["pack"]][offset : offset + file["size"]]
            else:
                found[file["path"]] = self._read(prefix + file["path"])
        return found

    def _judge_marker(self, marker: Marker) -> None:
        def suspicion() -> str:
            # A trainer's line may still be on its way to us.
            problem = self._problem_or_missing(marker)
            return problem if problem and marker.key in self._markers() else ""

        problem = self._seen_again_and_again(suspicion)
        if problem and marker.key not in self._lost:
            self._lost.add(marker.key)
            self._report.lose(Loss.BROKEN, f"{marker.key}: {problem}")
        self._verified.add(marker.key)

    def _judge_vanished(self, marker: Marker) -> None:
        def suspicion() -> str:
            listed = self._markers()
            newer = [one for one in listed.values() if one.step >= marker.step]
            if marker.key in listed or len(newer) >= self._keep_last:
                return ""
            return f"only {sorted(newer)} are as new"

        problem = self._seen_again_and_again(suspicion)
        if problem:
            self._lost.add(marker.key)
            self._report.lose(Loss.VANISHED, f"{marker.key}: {problem}")

    def _seen_again_and_again(self, suspicion: Callable[[], str]) -> str:
        """The last of several suspicions in a row; empty as soon as one look shows none. Raises UnansweredError."""
        problem = ""
        for look in range(_LOOKS):
            if look:
                time.sleep(2 * _LOOK_SECONDS)
            problem = suspicion()
            if not problem:
                return ""
        return problem

    def _problem_or_missing(self, marker: Marker) -> str:
        try:
            return self.problem(marker)
        except KeyError as error:
            return f"missing: {error}"
        except ValueError as error:
            return f"not to be read: {error}"

    def _markers(self) -> dict[str, Marker]:
        found: dict[str, Marker] = {}
        token: dict[str, str] = {}
        while True:
            answer = self._ask(
                self._client.list_objects_v2,
                Bucket=self._bucket.name,
                Prefix=f"{self._bucket.prefix}/.keepstep/commits/",
                **token,
            )
            for entry in answer.get("Contents", []):
                match = _MARKER.search(entry["Key"])
                if match:
                    found[entry["Key"]] = Marker(step=step_of(entry["Key"]), save=match[2], key=entry["Key"])
            if not answer.get("IsTruncated"):
                return found
            token = {"ContinuationToken": answer["NextContinuationToken"]}

    def _read(self, key: str) -> bytes:
        """Raises KeyError when the store says that there is none, UnansweredError when it says nothing."""
        answer = self._ask(self._client.get_object, Bucket=self._bucket.name, Key=key)
        try:
            body: bytes = answer["Body"].read()
        except Exception as error:  # of urllib3, botocore or the socket: in each case there is no answer
            raise UnansweredError(str(error)) from error
        return body

    def _ask(self, call: Callable[..., Any], **arguments: Any) -> Any:
        try:
            return call(**arguments)
        except ClientError as error:
            if error.response["Error"]["Code"] == "NoSuchKey":
                raise KeyError(arguments["Key"]) from error
            raise UnansweredError(str(error)) from error
        except BotoCoreError as error:
            raise UnansweredError(str(error)) from error

    def _watch(self) -> None:
        while not self._closing.wait(_LOOK_SECONDS):
            try:
                self.look()
            except UnansweredError:
                self._report.count("looks of the oracle without an answer")
