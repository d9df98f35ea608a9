"""Every foreign exception becomes one kind, with a message that names the place and never a secret."""

import aiohttp
import botocore.exceptions
import botocore.parsers
import pytest

from keepstep_agent.adapters.s3.errors import FOREIGN, Place, translate
from keepstep_agent.core.errors import ErrorKind, StoreError

PLACE = Place(bucket="bucket", key="run/key", endpoint="https://user:hunter2@store.example:9000")


def answer(status: int, code: str, message: str = "") -> botocore.exceptions.ClientError:
    response = {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return botocore.exceptions.ClientError(response, "PutObject")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (answer(403, "AccessDenied"), ErrorKind.ACCESS_DENIED),
        (answer(403, "403"), ErrorKind.ACCESS_DENIED),
        (answer(401, "401"), ErrorKind.ACCESS_DENIED),
        (answer(403, "InvalidAccessKeyId"), ErrorKind.ACCESS_DENIED),
        (answer(403, "SignatureDoesNotMatch"), ErrorKind.ACCESS_DENIED),
        (answer(400, "ExpiredToken"), ErrorKind.ACCESS_DENIED),
        (answer(400, "InvalidToken"), ErrorKind.ACCESS_DENIED),
        (answer(400, "KMS.DisabledException"), ErrorKind.ACCESS_DENIED),
        (answer(404, "NoSuchBucket"), ErrorKind.BUCKET_MISSING),
        (answer(404, "404"), ErrorKind.STORE_FAILED),
        (answer(404, ""), ErrorKind.STORE_FAILED),
        (answer(404, "NoSuchUpload"), ErrorKind.UPLOAD_LOST),
        (answer(400, "InvalidPart"), ErrorKind.UPLOAD_LOST),
        (answer(412, "PreconditionFailed"), ErrorKind.ALREADY_EXISTS),
        (answer(412, "412"), ErrorKind.ALREADY_EXISTS),
        (answer(409, "ConditionalRequestConflict"), ErrorKind.STORE_FAILED),
        (answer(409, "OperationAborted"), ErrorKind.STORE_FAILED),
        (answer(403, "RequestTimeTooSkewed"), ErrorKind.CLOCK_SKEWED),
        (answer(503, "SlowDown"), ErrorKind.THROTTLED),
        (answer(503, "503"), ErrorKind.THROTTLED),
        (answer(429, "TooManyRequests"), ErrorKind.THROTTLED),
        (answer(429, "whatever"), ErrorKind.THROTTLED),
        (answer(400, "RequestTimeout"), ErrorKind.TIMED_OUT),
        (answer(504, "504"), ErrorKind.TIMED_OUT),
        (answer(500, "InternalError"), ErrorKind.STORE_FAILED),
        (answer(502, "502"), ErrorKind.STORE_FAILED),
        (answer(400, "BadDigest"), ErrorKind.CORRUPTED_IN_TRANSIT),
        (answer(400, "XAmzContentSHA256Mismatch"), ErrorKind.CORRUPTED_IN_TRANSIT),
        (answer(400, "XAmzContentChecksumMismatch"), ErrorKind.CORRUPTED_IN_TRANSIT),
        (answer(507, "507"), ErrorKind.STORE_FULL),
        (answer(403, "QuotaExceeded"), ErrorKind.STORE_FULL),
        (answer(403, "RetentionPolicyNotMet"), ErrorKind.OBJECT_LOCKED),
        (answer(403, "ObjectUnderActiveHold"), ErrorKind.OBJECT_LOCKED),
        (
            answer(403, "AccessDenied", "Access Denied because object protected by object lock."),
            ErrorKind.OBJECT_LOCKED,
        ),
        (answer(403, "AccessDenied", "Object is under retention until 2031"), ErrorKind.OBJECT_LOCKED),
        (
            answer(403, "AccessDenied", "User: u is not authorized to perform: s3:DeleteObject on a retention policy"),
            ErrorKind.ACCESS_DENIED,
        ),
        (answer(403, "AccessDenied", "No access to arn:aws:s3:::retention/object-lock/WORM"), ErrorKind.ACCESS_DENIED),
        (
            answer(400, "BadDigest", "The Content-MD5 you specified did not match what we received."),
            ErrorKind.CORRUPTED_IN_TRANSIT,
        ),
        (
            answer(400, "InvalidRequest", "Missing required header for this request: Content-MD5"),
            ErrorKind.REQUEST_REFUSED,
        ),
        (answer(400, "EntityTooLarge"), ErrorKind.REQUEST_REFUSED),
        (answer(400, "EntityTooSmall"), ErrorKind.REQUEST_REFUSED),
        (answer(301, "PermanentRedirect"), ErrorKind.REQUEST_REFUSED),
        (answer(501, "NotImplemented"), ErrorKind.REQUEST_REFUSED),
        (answer(400, "SomethingNew"), ErrorKind.REQUEST_REFUSED),
        (botocore.exceptions.NoCredentialsError(), ErrorKind.ACCESS_DENIED),
        (
            botocore.exceptions.PartialCredentialsError(provider="env", cred_var="AWS_SECRET_ACCESS_KEY"),
            ErrorKind.ACCESS_DENIED,
        ),
        (
            botocore.exceptions.CredentialRetrievalError(provider="web-identity", error_msg="no token"),
            ErrorKind.ACCESS_DENIED,
        ),
        (botocore.exceptions.ConnectTimeoutError(endpoint_url="x"), ErrorKind.TIMED_OUT),
        (botocore.exceptions.ReadTimeoutError(endpoint_url="x"), ErrorKind.TIMED_OUT),
        (TimeoutError(), ErrorKind.TIMED_OUT),
        (botocore.exceptions.EndpointConnectionError(endpoint_url="x", error="dns"), ErrorKind.UNREACHABLE),
        (botocore.exceptions.ConnectionClosedError(endpoint_url="x"), ErrorKind.UNREACHABLE),
        (botocore.exceptions.ProxyConnectionError(proxy_url="x"), ErrorKind.UNREACHABLE),
        (botocore.exceptions.SSLError(endpoint_url="x", error="self-signed"), ErrorKind.UNREACHABLE),
        (botocore.exceptions.HTTPClientError(error="odd"), ErrorKind.UNREACHABLE),
        # As aiobotocore wraps what our own session raises.
        (
            botocore.exceptions.HTTPClientError(error=StoreError(ErrorKind.BAD_CONFIGURATION, "a member is gone")),
            ErrorKind.BAD_CONFIGURATION,
        ),
        (botocore.exceptions.ResponseStreamingError(error="cut"), ErrorKind.UNREACHABLE),
        (botocore.exceptions.IncompleteReadError(actual_bytes=1, expected_bytes=2), ErrorKind.UNREACHABLE),
        (aiohttp.ClientPayloadError("cut"), ErrorKind.UNREACHABLE),
        (ConnectionResetError(104, "reset"), ErrorKind.UNREACHABLE),
        (botocore.exceptions.ParamValidationError(report="bad bucket"), ErrorKind.REQUEST_REFUSED),
        (botocore.parsers.ResponseParserError("<html>"), ErrorKind.STORE_FAILED),
        (KeyError("UploadId"), ErrorKind.STORE_FAILED),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_an_exception_has_its_kind_and_names_the_place(error: Exception, kind: ErrorKind) -> None:
    translated = translate(error, "PutObject", PLACE)

    assert translated.kind is kind
    assert isinstance(error, FOREIGN)
    assert "s3://bucket/run/key" in str(translated)
    assert "store.example:9000" in str(translated)
    assert "hunter2" not in str(translated)
    assert "\n" not in str(translated)


@pytest.mark.parametrize(
    ("operation", "kind"),
    [
        ("HeadObject", ErrorKind.NOT_FOUND),
        ("GetObject", ErrorKind.NOT_FOUND),
        ("UploadPart", ErrorKind.UPLOAD_LOST),
        ("PutObject", ErrorKind.STORE_FAILED),
        ("CreateMultipartUpload", ErrorKind.STORE_FAILED),
        ("ListObjectsV2", ErrorKind.STORE_FAILED),
    ],
)
def test_only_what_was_there_before_can_be_missing(operation: str, kind: ErrorKind) -> None:
    assert translate(answer(404, "NoSuchKey"), operation, PLACE).kind is kind


def test_missing_credentials_name_all_the_ways_to_give_them_those_of_a_laptop_first() -> None:
    hint = translate(botocore.exceptions.NoCredentialsError(), "PutObject", PLACE).hint

    laptop = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "~/.aws/credentials")
    pod = ("Secret", "workload identity")
    places = [hint.find(way) for way in (*laptop, *pod)]
    assert -1 not in places
    assert places == sorted(places)
    assert "annotation" not in hint


def test_a_long_answer_is_cut() -> None:
    assert len(str(translate(answer(500, "InternalError", "x" * 10_000), "PutObject", PLACE))) < 500
