"""Makes the botocore client: credentials, endpoint, addressing, TLS, and how payloads are signed.

Owns every setting of botocore; knows nothing of operations. Neither botocore nor aiohttp retries (the core decides).
botocore never computes a checksum (ours are computed off the event loop) and never hashes a file's bytes. Credentials
may come from the files of a mounted Secret, one file per key, in any of the spellings that Secrets use.

With awscrt installed, botocore would sign with it and read bodies in 4 KiB pieces through Python callbacks. The usual
switch is BOTO_DISABLE_CRT in the environment. Choosing our own signer below has the same effect without it.
"""

import re
import ssl
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Final

import aiobotocore
import structlog
from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from botocore.auth import AUTH_TYPE_MAPS, S3SigV4Auth
from botocore.exceptions import BotoCoreError
from botocore.utils import parse_timestamp

import keepstep_agent
from keepstep_agent.adapters.s3.http_session import StoreSession, refuse_redirects
from keepstep_agent.core.errors import ErrorKind, KeepstepError
from keepstep_agent.core.settings.values import StoreSettings

_SPELLINGS: Final = {
    "access_key": ("accesskeyid", "accesskey"),
    "secret_key": ("secretaccesskey", "secretkey", "accesssecretkey", "accesskeysecret"),
    "session_token": ("sessiontoken",),
    "endpoint_url": ("endpointurl", "endpoint"),
    "region": ("defaultregion", "region"),
}
# The endpoint that data connections name for AWS itself. It is ignored: botocore derives a better one from the region.
_AWS_ENDPOINT: Final = re.compile(r"(https?://)?s3([.-][a-z0-9-]+)?\.amazonaws\.com/?")


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretKeys:
    """What a Secret holds. An empty field is missing from it. Either both keys are set or neither is."""

    access_key: str = ""
    secret_key: str = ""
    session_token: str = ""
    endpoint_url: str = ""
    region: str = ""


def read_secret(directory: str) -> SecretKeys:
    """Read credentials, endpoint and region from a mounted Secret.

    Raises BAD_CONFIGURATION if it holds nothing usable, or only one of the two keys. No message contains a credential.
    """
    texts = _texts(Path(directory))
    said = {_plain(key): text for key, text in texts.items()}
    found = {
        field: next((said[spelling] for spelling in spellings if said.get(spelling)), "")
        for field, spellings in _SPELLINGS.items()
    }
    keys = SecretKeys(**{**found, "endpoint_url": _endpoint(found["endpoint_url"])})
    if bool(keys.access_key) != bool(keys.secret_key) or not any(found.values()):
        what = "an access key and its secret" if not keys.access_key else "the secret of its access key"
        raise KeepstepError(
            ErrorKind.BAD_CONFIGURATION,
            f"the Secret at {directory} lacks {what}; it has {', '.join(sorted(texts)) or 'nothing'}",
            hint="name its keys AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or access-key-id and secret-access-key",
        )
    return keys


def _texts(directory: Path) -> Mapping[str, str]:
    """Return the text of each file by its name. Names that begin with two dots are kubelet's own and are skipped."""
    try:
        return {
            path.name: path.read_text().strip()
            for path in directory.iterdir()
            if not path.name.startswith("..") and path.is_file()
        }
    except (OSError, ValueError) as error:
        raise KeepstepError(
            ErrorKind.BAD_CONFIGURATION,
            f"cannot read the Secret at {directory}: {error.strerror if isinstance(error, OSError) else 'no text'}",
            hint="give a directory with one text file per key that this process can read",
        ) from error


def _plain(key: str) -> str:
    return re.sub(r"^(aws)?(s3)?", "", re.sub(r"[^a-z0-9]", "", key.lower()))


def _endpoint(text: str) -> str:
    if not text or _AWS_ENDPOINT.fullmatch(text):
        return ""
    if not re.match(r"https?://", text):
        raise KeepstepError(
            ErrorKind.BAD_CONFIGURATION,
            f"the endpoint {text!r} in the Secret is not a URL",
            hint="begin it with https:// or http://, or set --endpoint-url, which takes precedence",
        )
    return text


logger = structlog.get_logger(__name__)

_SIGNER: Final = "keepstep-s3v4"
# The store, and the services that give credentials to service accounts and to people who signed in.
_SERVICES: Final = frozenset({"s3", "sts", "portal.sso", "oidc"})
_DEFAULT_REGION: Final = "us-east-1"
_AWS_HOST: Final = re.compile(r"^https?://[^/]*\.amazonaws\.com(\.cn)?(:\d+)?(/|$)")


class _DeclaredPayloadAuth(S3SigV4Auth):  # type: ignore[misc]  # botocore has no types
    """Signature version 4 that takes the payload's hash from the body if the body declares one.

    Other payloads are small and are signed by their SHA-256, over TLS too.
    """

    def payload(self, request: Any) -> str:
        declared: str = getattr(request.body, "payload_signature", "")
        return declared or str(super().payload(request))


AUTH_TYPE_MAPS[_SIGNER] = _DeclaredPayloadAuth


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """The parts of s3://bucket/prefix. `prefix` is empty or ends with a slash."""

    bucket: str
    prefix: str


def parse_destination(url: str) -> Destination:
    """Parse s3://bucket/prefix. Raises BAD_CONFIGURATION if it has no bucket, or two slashes in a row in the prefix."""
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    prefix = prefix.strip("/")
    if not url.startswith("s3://") or not bucket or "//" in prefix:
        raise KeepstepError(
            ErrorKind.BAD_CONFIGURATION, f"{url!r} is not an S3 destination", hint="write it as s3://bucket/prefix"
        )
    return Destination(bucket=bucket, prefix=f"{prefix}/" if prefix else "")


async def connect(settings: StoreSettings, stack: AsyncExitStack) -> Any:
    """Make a client that `stack` closes. Makes no request. Raises BAD_CONFIGURATION if the settings cannot work."""
    if not settings.verify_tls:
        logger.warning("tls.not_verified", destination=settings.destination, endpoint=settings.endpoint_url)
    elif settings.ca_bundle:
        _check_ca_bundle(settings.ca_bundle)
    keys = read_secret(settings.credentials_directory) if settings.credentials_directory else SecretKeys()
    settings = replace(
        settings, endpoint_url=settings.endpoint_url or keys.endpoint_url, region=settings.region or keys.region
    )
    addressing = settings.addressing
    if addressing == "auto" and settings.endpoint_url:
        addressing = "path"
    try:
        client = await stack.enter_async_context(_client(settings, keys, addressing))
        if addressing == "auto" and not _AWS_HOST.match(client.meta.endpoint_url):
            # The endpoint came from AWS_ENDPOINT_URL or a profile, which only botocore can tell.
            await client.close()
            client = await stack.enter_async_context(_client(settings, keys, "path"))
    except (BotoCoreError, ValueError, OSError) as error:
        raise KeepstepError(
            ErrorKind.BAD_CONFIGURATION,
            f"cannot create an S3 client for {settings.destination}: {error}",
            hint="check the endpoint, the region, the CA bundle and AWS_PROFILE",
        ) from error
    client.meta.events.register("choose-signer.s3", _choose_signer)
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
            hint="set --ca-bundle to a PEM file with certificates that this process can read",
        ) from error


def _client(settings: StoreSettings, keys: SecretKeys, addressing: str) -> Any:
    session = get_session()
    forget_other_services(session)
    session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=read_time)
    region = settings.region or session.get_config_variable("region") or _DEFAULT_REGION
    return session.create_client(
        "s3",
        region_name=region,
        endpoint_url=settings.endpoint_url or None,
        # None: use whatever the AWS chain finds.
        aws_access_key_id=keys.access_key or None,
        aws_secret_access_key=keys.secret_key or None,
        aws_session_token=keys.session_token or None,
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
            s3={"addressing_style": addressing},
        ),
    )


def forget_other_services(session: Any) -> None:
    """Drop botocore's list of the endpoints of other AWS services, which takes 7 MB.

    botocore falls back to rules for services that are not in its list.
    """
    for partition in session.get_component("data_loader").load_data("endpoints")["partitions"]:
        for service in partition["services"].keys() - _SERVICES:
            del partition["services"][service]


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


def _choose_signer(signature_version: str, **_: object) -> str | None:
    # Others (S3 Express, multi-region access points) need their own signers.
    return _SIGNER if signature_version in ("s3v4", "v4") else None
