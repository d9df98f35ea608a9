"""Translates every exception of botocore, aiohttp and TLS into a StoreError, in one table-tested function.

Owns the tables. Invariants: every message names bucket, key and endpoint; no message holds a secret (no headers, no
URLs with credentials, only the store's code and text); a hint says what the user can do, if there is anything to do.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import botocore.exceptions
import botocore.parsers

from keepstep_agent.core.errors import ErrorKind, StoreError, without_passwords
from keepstep_agent.core.settings.table import spelled
from keepstep_api.names import ANNOTATION_PREFIX

_LONGEST_TEXT: Final = 300

_CREDENTIALS_HINT: Final = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or write ~/.aws/credentials; in a pod, name "
    f"a Secret in {ANNOTATION_PREFIX}credentials, or give its service account a workload identity "
    "(IRSA, EKS Pod Identity)"
)
_POLICY_HINT: Final = "the policy must allow s3:ListBucket, GetObject, PutObject, DeleteObject and AbortMultipartUpload"
_CLOCK_HINT: Final = "set this machine's clock (NTP); stores refuse signatures that are more than 15 minutes off"
_REGION_HINT: Final = f"set the region of the bucket, such as eu-central-1, by AWS_REGION or {spelled('store.region')}"
_PARTS_HINT: Final = f"raise {spelled('transfer.part_size_bytes')}: the store requires larger parts"
_GATEWAY_HINT: Final = "not the store's answer: check the endpoint, and the ingress or gateway before it"
_SPACE_HINT: Final = "give the store more space, or keep fewer checkpoints"
_CHECKSUM_HINT: Final = (
    "the bucket asks for a checksum with every write (Object Lock), which it did not do when the store was opened: "
    "start the agent again"
)
_LOCKED_HINT: Final = (
    "the store's retention protects the object: it may be deleted when that ends. Keepstep replaces some of its small "
    "objects, which Object Lock allows and a retention policy of the whole bucket may not"
)
_NETWORK_HINT: Final = "check the endpoint, and that network policies and proxies let this pod reach it"

_CODES: Final[Mapping[str, tuple[ErrorKind, str]]] = {
    "AccessDenied": (ErrorKind.ACCESS_DENIED, _POLICY_HINT),
    "AccountProblem": (ErrorKind.ACCESS_DENIED, "the store refuses the whole account: ask its owner"),
    "AllAccessDisabled": (ErrorKind.ACCESS_DENIED, "the store refuses the whole account: ask its owner"),
    "ExpiredToken": (ErrorKind.ACCESS_DENIED, "the session token has expired: renew the credentials"),
    "ExpiredTokenException": (ErrorKind.ACCESS_DENIED, "the session token has expired: renew the credentials"),
    "InvalidAccessKeyId": (ErrorKind.ACCESS_DENIED, "the access key id is not known to this endpoint"),
    "InvalidToken": (ErrorKind.ACCESS_DENIED, "the session token does not belong to this access key"),
    "SignatureDoesNotMatch": (ErrorKind.ACCESS_DENIED, "the secret access key is wrong for this access key id"),
    "TokenRefreshRequired": (ErrorKind.ACCESS_DENIED, "the session token has expired: renew the credentials"),
    "InvalidObjectState": (ErrorKind.REQUEST_REFUSED, "the object is archived: restore it to a readable class first"),
    "NoSuchBucket": (ErrorKind.BUCKET_MISSING, "create the bucket, or correct the destination"),
    "InvalidBucketName": (ErrorKind.BUCKET_MISSING, "correct the destination: the bucket's name is invalid"),
    "NoSuchKey": (ErrorKind.NOT_FOUND, ""),
    "NoSuchLifecycleConfiguration": (ErrorKind.NOT_FOUND, ""),
    "NoSuchUpload": (ErrorKind.UPLOAD_LOST, ""),
    "InvalidPart": (ErrorKind.UPLOAD_LOST, ""),
    "PreconditionFailed": (ErrorKind.ALREADY_EXISTS, ""),
    "ConditionalRequestConflict": (ErrorKind.STORE_FAILED, ""),
    "OperationAborted": (ErrorKind.STORE_FAILED, ""),
    "RequestTimeTooSkewed": (ErrorKind.CLOCK_SKEWED, _CLOCK_HINT),
    "RequestExpired": (ErrorKind.CLOCK_SKEWED, _CLOCK_HINT),
    "SlowDown": (ErrorKind.THROTTLED, ""),
    "SlowDownRead": (ErrorKind.THROTTLED, ""),
    "SlowDownWrite": (ErrorKind.THROTTLED, ""),
    "Throttling": (ErrorKind.THROTTLED, ""),
    "ThrottlingException": (ErrorKind.THROTTLED, ""),
    "TooManyRequests": (ErrorKind.THROTTLED, ""),
    "TooManyRequestsException": (ErrorKind.THROTTLED, ""),
    "RequestLimitExceeded": (ErrorKind.THROTTLED, ""),
    "RequestTimeout": (ErrorKind.TIMED_OUT, ""),
    "BadDigest": (ErrorKind.CORRUPTED_IN_TRANSIT, ""),
    "IncompleteBody": (ErrorKind.CORRUPTED_IN_TRANSIT, ""),
    "XAmzContentChecksumMismatch": (ErrorKind.CORRUPTED_IN_TRANSIT, ""),
    "XAmzContentSHA256Mismatch": (ErrorKind.CORRUPTED_IN_TRANSIT, ""),
    "InternalError": (ErrorKind.STORE_FAILED, ""),
    "QuotaExceeded": (ErrorKind.STORE_FULL, "raise the quota, or keep fewer checkpoints"),
    "InsufficientCapacity": (ErrorKind.STORE_FULL, _SPACE_HINT),
    "XMinioStorageFull": (ErrorKind.STORE_FULL, _SPACE_HINT),
    "XMinioAdminBucketQuotaExceeded": (ErrorKind.STORE_FULL, "raise the quota, or keep fewer checkpoints"),
    "InvalidStorageClass": (
        ErrorKind.REQUEST_REFUSED,
        f"the store has no such storage class: correct {spelled('store.storage_class')}",
    ),
    "KeyTooLongError": (ErrorKind.REQUEST_REFUSED, "use shorter names for files and folders, or a shorter destination"),
    "EntityTooLarge": (ErrorKind.REQUEST_REFUSED, "the store does not accept an object or part of this size"),
    "EntityTooSmall": (ErrorKind.REQUEST_REFUSED, _PARTS_HINT),
    "AuthorizationHeaderMalformed": (ErrorKind.REQUEST_REFUSED, _REGION_HINT),
    "IllegalLocationConstraintException": (ErrorKind.REQUEST_REFUSED, _REGION_HINT),
    "PermanentRedirect": (ErrorKind.REQUEST_REFUSED, _REGION_HINT),
}
"""Error codes of S3 and of stores that imitate it. For all others the HTTP status decides."""

_STATUSES: Final[Mapping[int, tuple[ErrorKind, str]]] = {
    401: (ErrorKind.ACCESS_DENIED, _POLICY_HINT),
    403: (ErrorKind.ACCESS_DENIED, _POLICY_HINT),
    # Only S3's own codes say that an object is missing. Another 404 is a gateway's that cannot find the store just now.
    404: (ErrorKind.STORE_FAILED, _GATEWAY_HINT),
    408: (ErrorKind.TIMED_OUT, ""),
    409: (ErrorKind.STORE_FAILED, ""),
    412: (ErrorKind.ALREADY_EXISTS, ""),
    429: (ErrorKind.THROTTLED, ""),
    501: (ErrorKind.REQUEST_REFUSED, "this store does not support the operation"),
    503: (ErrorKind.THROTTLED, ""),
    504: (ErrorKind.TIMED_OUT, ""),
    507: (ErrorKind.STORE_FULL, _SPACE_HINT),
}

_PASSING_REDIRECTS: Final[Mapping[int, ErrorKind]] = dict.fromkeys((302, 303, 307), ErrorKind.STORE_FAILED)
"""AWS sends these while a new bucket becomes known everywhere. Other redirects are permanent."""

_NO_SUCH_KEY: Final[Mapping[str, ErrorKind]] = {
    "HeadObject": ErrorKind.NOT_FOUND,
    "GetObject": ErrorKind.NOT_FOUND,
    "DeleteObject": ErrorKind.NOT_FOUND,
    "GetBucketLifecycleConfiguration": ErrorKind.NOT_FOUND,
    "UploadPart": ErrorKind.UPLOAD_LOST,
    "ListParts": ErrorKind.UPLOAD_LOST,
    "CompleteMultipartUpload": ErrorKind.UPLOAD_LOST,
    "AbortMultipartUpload": ErrorKind.UPLOAD_LOST,
}
"""What NoSuchKey means for operations on something that exists already. For all others it means STORE_FAILED: there is
no object that could be missing."""

FOREIGN: Final = (
    botocore.exceptions.BotoCoreError,
    botocore.exceptions.ClientError,
    botocore.parsers.ResponseParserError,
    aiohttp.ClientError,
    OSError,
    # An answer that lacks a field that every S3 sends.
    KeyError,
    ValueError,
    # botocore raises it for a date that does not exist.
    RuntimeError,
)
"""The exceptions that `translate` takes. Any other is a bug of ours and must stay visible."""


_CHECKSUM_WANTED: Final = re.compile(
    r"(?=.*\b(required|missing)\b).*(Content-MD5|x-amz-(sdk-)?checksum)", re.IGNORECASE | re.DOTALL
)
_LOCKED_CODES: Final = frozenset({"RetentionPolicyNotMet", "ObjectLocked", "ObjectUnderActiveHold"})
_LOCKED: Final = re.compile(
    r"(protected|locked) by object lock|\bWORM protected\b|under (active |a )?(retention|legal hold)"
    r"|\bretention (period|policy|date|until)\b",
    re.IGNORECASE,
)
"""Most stores refuse a protected object with AccessDenied, and only the text tells it from a missing right."""

_NO_CREDENTIALS: Final = (
    botocore.exceptions.NoCredentialsError,
    botocore.exceptions.PartialCredentialsError,
    botocore.exceptions.CredentialRetrievalError,
    botocore.exceptions.TokenRetrievalError,
    botocore.exceptions.UnauthorizedSSOTokenError,
    botocore.exceptions.SSOTokenLoadError,
)
_UNSENT: Final = (
    *_NO_CREDENTIALS,
    botocore.exceptions.ParamValidationError,
    botocore.exceptions.EndpointProviderError,
    botocore.exceptions.UnsupportedS3ConfigurationError,
    botocore.exceptions.InvalidRegionError,
    botocore.exceptions.MissingDependencyException,
)
"""botocore raises these before it sends anything."""

_REGION: Final = re.compile(r"[a-z0-9-]{1,40}")
_HOST: Final = re.compile(r"[A-Za-z0-9.:\[\]-]{1,255}")
_XML_CODE: Final = re.compile(rb"<Code>([A-Za-z0-9.]{1,64})</Code>")
_XML_ENDPOINT: Final = re.compile(rb"<Endpoint>([A-Za-z0-9.:-]{1,255})</Endpoint>")


class OversizedAnswerError(ValueError):
    """An answer that is longer than any answer of an S3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a request went, for messages. `key` is the whole key in the bucket."""

    bucket: str
    key: str
    endpoint: str

    def __str__(self) -> str:
        parts = urlsplit(without_passwords(self.endpoint))
        return f"s3://{self.bucket}/{self.key} at {parts.scheme}://{parts.netloc}"


def translate(error: BaseException, operation: str, place: Place) -> StoreError:
    """Return the StoreError for `error`; raise it `from error`. `operation` is what we tried, e.g. PutObject."""
    kind, hint, reason = _classify(error)
    if kind is ErrorKind.NOT_FOUND:
        kind = _NO_SUCH_KEY.get(operation, ErrorKind.STORE_FAILED)
    return StoreError(kind, f"{operation} {place}: {reason}", hint=hint, sent=not isinstance(error, _UNSENT))


@contextmanager
def ignored(*kinds: ErrorKind) -> Iterator[None]:
    """Let a request end well that found nothing to do, as these kinds of errors say."""
    try:
        yield
    except StoreError as error:
        if error.kind not in kinds:
            raise


def redirect_details(headers: Mapping[str, str], body: bytes) -> dict[str, str]:
    """Return where a redirect points, as the details of botocore's ClientError. Every value must match a pattern.

    `Endpoint` has a scheme if it comes from the Location header; S3's own XML names only a host.
    """
    details = {}
    if code := _XML_CODE.search(body):
        details["Code"] = code[1].decode()
    if _REGION.fullmatch(region := headers.get("x-amz-bucket-region", "")):
        details["Region"] = region
    try:
        location = urlsplit(headers.get("location", ""))
    except ValueError:
        location = urlsplit("")
    host = location.netloc.rpartition("@")[2]
    if location.scheme in ("http", "https") and _HOST.fullmatch(host):
        details["Endpoint"] = f"{location.scheme}://{host}"
    elif endpoint := _XML_ENDPOINT.search(body):
        details["Endpoint"] = endpoint[1].decode()
    return details


def _classify(error: BaseException) -> tuple[ErrorKind, str, str]:
    exceptions = botocore.exceptions
    if isinstance(error, exceptions.HTTPClientError):
        inner = error.kwargs.get("error")
        error = inner if isinstance(inner, OversizedAnswerError | StoreError) else error
    match error:
        case StoreError():
            return error.kind, str(error), error.hint
        case exceptions.ClientError():
            return _classify_answer(error.response)
        case _ if isinstance(error, _NO_CREDENTIALS):
            return ErrorKind.ACCESS_DENIED, _CREDENTIALS_HINT, "no usable credentials were found"
        case exceptions.ConnectTimeoutError() | exceptions.ReadTimeoutError() | TimeoutError():
            return ErrorKind.TIMED_OUT, _NETWORK_HINT, "the store did not answer in time"
        case exceptions.SSLError() | aiohttp.ClientSSLError():
            hint = f"give the CA that signed the endpoint's certificate as the CA bundle: {spelled('store.ca_bundle')}"
            return ErrorKind.UNREACHABLE, hint, f"TLS failed: {_inner(error)}"
        case exceptions.ProxyConnectionError():
            return ErrorKind.UNREACHABLE, "check HTTP_PROXY, HTTPS_PROXY and NO_PROXY", "the proxy cannot be reached"
        case (
            exceptions.ConnectionError()
            | exceptions.HTTPClientError()
            | exceptions.IncompleteReadError()
            | aiohttp.ClientError()
            | OSError()
        ):
            return ErrorKind.UNREACHABLE, _NETWORK_HINT, f"the connection failed: {_inner(error)}"
        case _ if isinstance(error, _UNSENT):
            return ErrorKind.REQUEST_REFUSED, "correct the destination", _shorten(str(error))
        case _:
            # ResponseParserError and the like: what answered is no S3, or a proxy answered in its place.
            return ErrorKind.STORE_FAILED, _NETWORK_HINT, f"unusable answer: {_shorten(str(error))}"


def _classify_answer(response: Mapping[str, Any]) -> tuple[ErrorKind, str, str]:
    details = response.get("Error", {})
    code = str(details.get("Code", ""))
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    text = _shorten(str(details.get("Message", "")))
    reason = f"{status} {code}: {text}" if text and text != code else f"{status} {code}".rstrip()
    if 300 <= status < 400:
        asked_for = ", ".join(f"{name.lower()} {details[name]}" for name in ("Region", "Endpoint") if name in details)
        kind = _PASSING_REDIRECTS.get(status, ErrorKind.REQUEST_REFUSED)
        return (
            kind,
            _redirect_hint(details),
            f"{reason}: it redirects to {asked_for or 'another place'}, which Keepstep does not follow",
        )
    if status == 400 and code not in _CODES and _CHECKSUM_WANTED.match(text):
        kind, hint = ErrorKind.REQUEST_REFUSED, _CHECKSUM_HINT
    elif code in _LOCKED_CODES or (status in (400, 403, 409) and _LOCKED.search(_without_names(text))):
        kind, hint = ErrorKind.OBJECT_LOCKED, _LOCKED_HINT
    elif code in _CODES:
        kind, hint = _CODES[code]
    elif code.startswith("KMS."):
        kind, hint = (
            ErrorKind.ACCESS_DENIED,
            "check that the KMS key is enabled and that its policy allows this role",
        )
    elif status in _STATUSES:
        kind, hint = _STATUSES[status]
    elif status >= 500:
        kind, hint = ErrorKind.STORE_FAILED, ""
    else:
        kind, hint = ErrorKind.REQUEST_REFUSED, ""
    if hint == _REGION_HINT or code == "400":  # a HEAD in the wrong region gets only a 400
        headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        region = str(details.get("Region") or headers.get("x-amz-bucket-region", ""))
        hint = _region_hint(region) if _REGION.fullmatch(region) else hint
    return kind, hint, reason


def _without_names(text: str) -> str:
    """Leave out what is not the store's own words: a missing right is told with the names of who, what and where."""
    return "" if "not authorized to perform" in text else text


def refuses_keys(answer: Mapping[str, Any]) -> bool:
    """Whether a store may answer this to keys that have expired or were replaced."""
    # An expired token is a 400 on AWS, and the answer to a HEAD has no body that says so.
    return int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)) >= 300 and (
        _classify_answer(answer)[0] is ErrorKind.ACCESS_DENIED or answer.get("Error", {}).get("Code") == "400"
    )


def _region_hint(region: str) -> str:
    return f"the bucket is in region {region}: set AWS_REGION={region}, or {spelled('store.region')} to it"


def _redirect_hint(details: Mapping[str, Any]) -> str:
    endpoint = str(details.get("Endpoint", ""))
    if region := details.get("Region"):
        return _region_hint(region)
    if "://" in endpoint:
        return (
            "a redirect would give your credentials to another server: "
            f"if it is your store, set {spelled('store.endpoint_url')} to {endpoint}"
        )
    return _REGION_HINT if endpoint or details.get("Code") == "PermanentRedirect" else _GATEWAY_HINT


def _inner(error: BaseException) -> str:
    """Return the network library's message, without botocore's own, which contains the whole URL."""
    cause = getattr(error, "kwargs", {}).get("error", error)
    return _shorten(str(cause) or type(cause).__name__)


def _shorten(text: str) -> str:
    text = "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}…"
