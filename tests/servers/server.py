"""What all S3 servers of the tests have in common, and a destination on one of them."""

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import boto3
import botocore.client
from tests.harness.bounds import HANG_SECONDS

from keepstep_agent.core.settings.values import StoreSettings

ACCESS_KEY = "keepstep-test-key"
SECRET_KEY = "keepstep-test-secret"
NEXT_ACCESS_KEY = "keepstep-next-key"
NEXT_SECRET_KEY = "keepstep-next-secret"
"""What rclone takes as well. A fault proxy before it can refuse the first pair, as if it were replaced."""
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": ACCESS_KEY,
    "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/nonexistent/config",
    "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent/credentials",
}
"""What a process needs to reach these servers, and not to look for anybody's real credentials."""


class S3Server(Protocol):
    """A real server on loopback. `ca_bundle` is empty for plain HTTP."""

    endpoint_url: str
    ca_bundle: Path | None

    def start(self) -> None: ...

    def stop(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A fresh bucket and prefix."""

    name: str
    prefix: str
    endpoint_url: str
    ca_bundle: Path | None

    @property
    def destination(self) -> str:
        return f"s3://{self.name}/{self.prefix}"

    def settings(self, **changes: Any) -> StoreSettings:
        values: dict[str, Any] = {
            "destination": self.destination,
            "endpoint_url": self.endpoint_url,
            "ca_bundle": str(self.ca_bundle or ""),
            "connect_timeout_seconds": HANG_SECONDS,
            "read_timeout_seconds": HANG_SECONDS,
        }
        return StoreSettings(**(values | changes))

    def client(self) -> Any:
        """boto3's own client, to look at the bucket with other eyes than ours."""
        return make_client(self.endpoint_url, self.ca_bundle)


def make_client(endpoint_url: str, ca_bundle: Path | None) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=endpoint_url,
        region_name="us-east-1",
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        verify=str(ca_bundle) if ca_bundle else None,
        config=botocore.client.Config(
            s3={"addressing_style": "path"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )


def make_bucket(server: S3Server) -> Bucket:
    name = f"test-{secrets.token_hex(8)}"
    client = make_client(server.endpoint_url, server.ca_bundle)
    client.create_bucket(Bucket=name)
    client.close()
    return Bucket(name=name, prefix="runs/one", endpoint_url=server.endpoint_url, ca_bundle=server.ca_bundle)
