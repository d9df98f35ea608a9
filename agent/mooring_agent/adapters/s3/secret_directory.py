"""Credentials from the files of a mounted Secret, one file per key, whichever way its author spells them.

The data connections of OpenShift AI and Kubeflow say AWS_ACCESS_KEY_ID and AWS_S3_ENDPOINT, others access-key-id,
accesskey or ACCESS_SECRET_KEY: what counts is what is left of a key without case, signs and a leading AWS or S3.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mooring_agent.core.errors import ErrorKind, MooringError

_SPELLINGS: Final = {
    "access_key": ("accesskeyid", "accesskey"),
    "secret_key": ("secretaccesskey", "secretkey", "accesssecretkey", "accesskeysecret"),
    "session_token": ("sessiontoken",),
    "endpoint_url": ("endpointurl", "endpoint"),
    "region": ("defaultregion", "region"),
}
# What data connections to AWS itself have; botocore knows better, from the region.
_AWS_ENDPOINT: Final = re.compile(r"(https?://)?s3([.-][a-z0-9-]+)?\.amazonaws\.com/?")


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretKeys:
    """Empty: the Secret does not say it. Both keys are there or neither."""

    access_key: str = ""
    secret_key: str = ""
    session_token: str = ""
    endpoint_url: str = ""
    region: str = ""


def read_secret(directory: str) -> SecretKeys:
    """BAD_CONFIGURATION where nothing of use is there; never with a value in the message."""
    texts = _texts(Path(directory))
    said = {_plain(key): text for key, text in texts.items()}
    found = {
        field: next((said[spelling] for spelling in spellings if said.get(spelling)), "")
        for field, spellings in _SPELLINGS.items()
    }
    keys = SecretKeys(**{**found, "endpoint_url": _endpoint(found["endpoint_url"])})
    if bool(keys.access_key) != bool(keys.secret_key) or not any(found.values()):
        what = "an access key and its secret" if not keys.access_key else "the secret of its access key"
        raise MooringError(
            ErrorKind.BAD_CONFIGURATION,
            f"the Secret at {directory} lacks {what}; it has {', '.join(sorted(texts)) or 'nothing'}",
            hint="name its keys AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or access-key-id and secret-access-key",
        )
    return keys


def _texts(directory: Path) -> Mapping[str, str]:
    """By key. What begins with dots is kubelet's own."""
    try:
        return {
            path.name: path.read_text().strip()
            for path in directory.iterdir()
            if not path.name.startswith("..") and path.is_file()
        }
    except (OSError, ValueError) as error:
        raise MooringError(
            ErrorKind.BAD_CONFIGURATION,
            f"cannot read the Secret at {directory}: {error.strerror if isinstance(error, OSError) else 'no text'}",
            hint="it is a directory with one text file per key, which this process may read",
        ) from error


def _plain(key: str) -> str:
    return re.sub(r"^(aws)?(s3)?", "", re.sub(r"[^a-z0-9]", "", key.lower()))


def _endpoint(text: str) -> str:
    if not text or _AWS_ENDPOINT.fullmatch(text):
        return ""
    if not re.match(r"https?://", text):
        raise MooringError(
            ErrorKind.BAD_CONFIGURATION,
            f"the endpoint {text!r} in the Secret is no URL",
            hint="begin it with https:// or http://, or give the endpoint to Mooring itself, which wins",
        )
    return text
