"""Makes the botocore client: credentials, endpoint, addressing, TLS, and how payloads are signed.

Owns every setting of botocore; knows nothing of operations. Neither botocore nor aiohttp retries (the core decides),
except that `credentials` has a refused request signed again.
botocore never computes a checksum (ours are computed off the event loop) and never hashes a file's bytes. Files that a
variable names are read, and those of the home directory if the settings allow it.

With awscrt installed, botocore would sign with it and read bodies in 4 KiB pieces through Python callbacks. The usual
switch is BOTO_DISABLE_CRT in the environment. Choosing our own signer below has the same effect without it.
"""

import re
import ssl
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final

import aiobotocore
import structlog
from aiobotocore.config import AioConfig
from botocore.auth import AUTH_TYPE_MAPS, S3SigV4Auth
from botocore.exceptions import BotoCoreError
from botocore.handlers import validate_bucket_name
from botocore.utils import parse_timestamp

import keepstep_agent
from keepstep_agent.adapters.s3.credentials import SIGNED_WITH, StoreCredentials, forget_other_services, make_session
from keepstep_agent.adapters.s3.http_session import StoreSession, refuse_redirects
from keepstep_agent.core.errors import ErrorKind, KeepstepError
from keepstep_agent.core.settings.checks import is_url
from keepstep_agent.core.settings.table import spelled
from keepstep_agent.core.settings.values import StoreSettings

logger = structlog.get_logger(__name__)

_SIGNER: Final = "keepstep-s3v4"
_AWS_HOST: Final = re.compile(r"^https?://[^/]*\.amazonaws\.com(\.cn)?(:\d+)?(/|$)")


class _DeclaredPayloadAuth(S3SigV4Auth):  # type: ignore[misc]  # botocore has no types
    """Signature version 4 that takes the payload's hash from the body if the body declares one.

    Other payloads are small and are signed by their SHA-256, over TLS too.
    """

    def add_auth(self, request: Any) -> None:
        request.context[SIGNED_WITH] = self.credentials
        super().add_auth(request)

    def payload(self, request: Any) -> str:
        declared: str = getattr(request.body, "payload_signature", "")
        return declared or str(super().payload(request))


AUTH_TYPE_MAPS[_SIGNER] = _DeclaredPayloadAuth


_ACCESS_POINT: Final = (
    r"arn:aws[a-z-]*:(s3|s3-object-lambda):[a-z0-9-]*:[0-9]{12}:accesspoint[:/][A-Za-z0-9.-]{1,63}"
    r"|arn:aws[a-z-]*:s3-outposts:[a-z0-9-]+:[0-9]{12}:outpost[:/][A-Za-z0-9-]{1,63}[:/]accesspoint[:/][A-Za-z0-9-]{1,63}"
)
_NAMED_BUCKET: Final = r"(?!arn:)([A-Za-z0-9_.-]*:)?[A-Za-z0-9_.-]{1,255}"
_DESTINATION: Final = re.compile(rf"s3://(?P<bucket>{_ACCESS_POINT}|{_NAMED_BUCKET})(?P<prefix>/.*)?", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """The parts of s3://bucket/prefix. `prefix` is empty or ends with a slash."""

    bucket: str
    prefix: str


def parse_destination(url: str) -> Destination:
    """Parse s3://bucket/prefix. Raises BAD_CONFIGURATION if it has no bucket, or two slashes in a row in the prefix.

    The bucket may be the ARN of an access point, which has slashes of its own, or Ceph's `tenant:bucket`.
    """
    found = _DESTINATION.fullmatch(url)
    prefix = (found["prefix"] or "").strip("/") if found else ""
    if found is None or "//" in prefix:
        raise KeepstepError(
            ErrorKind.BAD_CONFIGURATION,
            f"{url!r} is not an S3 destination",
            hint="write it as s3://bucket/prefix; the bucket may be the ARN of an access point, or tenant:bucket",
        )
    return Destination(bucket=found["bucket"], prefix=f"{prefix}/" if prefix else "")


async def connect(settings: StoreSettings, stack: AsyncExitStack) -> Any:
    """Make a client that `stack` closes. Makes no request. Raises BAD_CONFIGURATION if the settings cannot work."""
    if not settings.verify_tls:
        logger.warning("tls.not_verified", destination=settings.destination, endpoint=settings.endpoint_url)
    elif settings.ca_bundle:
        _check_ca_bundle(settings.ca_bundle)
    addressing = settings.addressing
    # An access point has a host of its own, and no path.
    by_path = addressing == "auto" and not parse_destination(settings.destination).bucket.startswith("arn:")
    try:
        session = make_session(aws_files=settings.aws_files)
        forget_other_services(session)
        session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=read_time)
        credentials = StoreCredentials(settings.credentials_directory, aws_files=settings.aws_files)
        stack.callback(credentials.close)
        keys = await credentials.load(session, settings.region)
        settings = replace(settings, endpoint_url=settings.endpoint_url or keys.endpoint_url)
        if by_path and settings.endpoint_url:
            addressing = "path"
        client = await stack.enter_async_context(_client(session, settings, addressing))
        if by_path and addressing == "auto" and not _AWS_HOST.match(client.meta.endpoint_url):
            # The endpoint came from AWS_ENDPOINT_URL or a profile, which only botocore can tell.
            await client.close()
            client = await stack.enter_async_context(_client(session, settings, "path"))
        if not is_url(client.meta.endpoint_url):
            raise ValueError("Invalid endpoint")
    except (BotoCoreError, ValueError, OSError) as error:
        # An endpoint that comes from AWS_ENDPOINT_URL or a profile may hold a password.
        reason = "its endpoint is not a URL" if str(error).startswith("Invalid endpoint") else error
        raise KeepstepError(
            ErrorKind.BAD_CONFIGURATION,
            f"cannot create an S3 client for {settings.destination}: {reason}",
            hint="check the endpoint, the region, the CA bundle and AWS_PROFILE",
        ) from error
    client.meta.events.register("needs-retry.s3", credentials.sign_again)
    client.meta.events.register("choose-signer.s3", _choose_signer)
    # `parse_destination` has judged the name, and knows Ceph's tenants.
    client.meta.events.unregister("before-parameter-build.s3", validate_bucket_name)
    if settings.requester_pays:
        client.meta.events.register("before-call.s3", _pay)
    refuse_redirects(client)
    return client


def _check_ca_bundle(path: str) -> None:
    """Raise BAD_CONFIGURATION if the CA bundle cannot be used.

    The HTTP library would read it only for the first request, and report a broken connection.
    """
    try:
        ssl.create_default_context(cafile=path)
    except OSError as error:
        raise KeepstepError(
            ErrorKind.BAD_CONFIGURATION,
            f"cannot use the CA bundle {path}: {error.strerror or error}",
            hint=f"set {spelled('store.ca_bundle')} to a PEM file with certificates that this process can read",
        ) from error


def _client(session: Any, settings: StoreSettings, addressing: str) -> Any:
    return session.create_client(
        "s3",
        region_name=session.get_config_variable("region"),
        endpoint_url=settings.endpoint_url or None,
        verify=(settings.ca_bundle or None) if settings.verify_tls else False,
        config=AioConfig(
            connect_timeout=settings.connect_timeout_seconds,
            read_timeout=settings.read_timeout_seconds,
            max_pool_connections=settings.max_connections,
            http_session_cls=StoreSession,
            # botocore assembles its own anew for every request, which costs a sixth of the request.
            user_agent=f"keepstep/{keepstep_agent.__version__} aiobotocore/{aiobotocore.__version__}",
            retries={"total_max_attempts": 1, "mode": "standard"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            # The region in the ARN of an access point is that of the access point.
            s3={"addressing_style": addressing, "use_arn_region": True},
        ),
    )


def read_time(value: Any) -> datetime:
    """Read a time of an answer. Raises ValueError if it is none.

    botocore's own parser tries every format that there is, a hundred microseconds for each object of a listing.
    """
    if isinstance(value, str):
        with suppress(ValueError):
            if value.endswith(" GMT"):
                return parsedate_to_datetime(value)
            if value.endswith("Z"):
                return datetime.fromisoformat(value)
    parsed: datetime = parse_timestamp(value)
    return parsed


def _pay(params: dict[str, Any], **_: object) -> None:
    params["headers"]["x-amz-request-payer"] = "requester"


def _choose_signer(signature_version: str, **_: object) -> str | None:
    # Others (S3 Express, multi-region access points) need their own signers.
    return _SIGNER if signature_version in ("s3v4", "v4") else None
