"""The store's credentials: from the files of a mounted Secret, or from wherever the AWS chain finds them.

Owners renew keys while we run: kubelet swaps the files of a Secret, and people, cron jobs and other programs rewrite
~/.aws/credentials. botocore renews only what says when it expires (roles, web identities, IAM Identity Center,
metadata services). So the files are read again every few seconds, and everything else when the store refuses the keys.
A request that was refused is signed once more if there are other keys by then.

A Secret has one file per key, in any of the spellings that Secrets use. No message contains a credential.
"""

import asyncio
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from typing import Any, Final

import structlog
from aiobotocore.credentials import AioCredentials, AioProcessProvider
from aiobotocore.session import get_session
from botocore.exceptions import BotoCoreError, NoCredentialsError
from botocore.loaders import Loader

from keepstep_agent.adapters.s3.errors import refuses_keys
from keepstep_agent.adapters.s3.renewal import LOOK_SECONDS, Renewal
from keepstep_agent.core.errors import ErrorKind, KeepstepError
from keepstep_agent.core.settings.checks import is_url
from keepstep_agent.core.settings.table import spelled

logger = structlog.get_logger(__name__)

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
    # Kubelet swaps the link ..data while we read. Behind the link lie the files of one version of the Secret.
    data = directory / "..data"
    try:
        return {
            path.name: path.read_text().strip()
            for path in (data.resolve() if data.is_symlink() else directory).iterdir()
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
    if not is_url(text):
        # Its text may hold a password.
        raise KeepstepError(
            ErrorKind.BAD_CONFIGURATION,
            "the endpoint in the Secret is not a URL such as https://host:port",
            hint=f"begin it with https:// or http://, write a / in a password as %2F, or set "
            f"{spelled('store.endpoint_url')}, which takes precedence",
        )
    return text


_AWS_FILES: Final = ("credentials_file", "config_file")
# A program of a profile (`credential_process`) may hang.
_FIND_SECONDS: Final = 60.0
_DEFAULT_REGION: Final = "us-east-1"
# The store, and the services that give credentials to service accounts and to people who signed in.
_SERVICES: Final = frozenset({"s3", "sts", "portal.sso", "oidc"})
_NAMED_FILES_ONLY: Final = {
    "config_file": (None, "AWS_CONFIG_FILE", None, None),
    "credentials_file": (None, "AWS_SHARED_CREDENTIALS_FILE", None, None),
}
"""botocore's own variables without their defaults, which are files in the home directory."""
SIGNED_WITH: Final = "keepstep-signed-with"
"""Where the signer leaves, in a request's context, the credentials that it signed with."""
_SIGNED_AGAIN: Final = "keepstep-signed-again"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Files:
    """What the files of the credentials hold. The AWS files are not read if the Secret has keys."""

    secret: SecretKeys
    aws_files: tuple[bytes, ...] = ()


class _Program:
    """A `credential_process`, as aiobotocore uses a process. It is ended if nobody waits for its answer any more."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, *command: str, stdout: int, stderr: int) -> "_Program":
        return cls(await asyncio.create_subprocess_exec(*command, stdout=stdout, stderr=stderr))

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    async def communicate(self) -> tuple[bytes, bytes]:
        try:
            return await self._process.communicate()
        except asyncio.CancelledError:
            # Also closes the pipes, which a child of the program may hold. Nothing public does.
            self._process._transport.close()  # type: ignore[attr-defined]  # it is private
            await self._process.wait()
            raise


# Profiles make such providers where nobody could give them an argument.
AioProcessProvider.__init__ = partialmethod(AioProcessProvider.__init__, popen=_Program.start)


class StoreCredentials(AioCredentials):  # type: ignore[misc]  # aiobotocore has no types
    """The credentials as botocore uses them, which asks for `get_frozen_credentials`, and a session's provider of them.

    The attributes of the base class stay empty.
    """

    def __init__(self, directory: str, *, aws_files: bool) -> None:
        """`directory` is that of the Secret; empty: there is none. `aws_files` is the setting of that name."""
        super().__init__("", "", method="keepstep")
        self._directory = directory
        self._aws_files = aws_files
        self._renewal = Renewal(self._read_again, "keepstep-credentials")
        self._region = ""
        self._paths: list[str] = []
        self._files = _Files(secret=SecretKeys())
        self._current: Any = None
        self._asked_at = 0.0
        self._problem = ""

    async def load(self, session: Any, region: str) -> SecretKeys:
        """Find them for the first time, by this session, and become its provider. Blocks.

        Sets the session's region, if `region` is empty to the Secret's or the profile's. Raises KeepstepError, or what
        botocore raises.
        """
        self._paths = [path for name in _AWS_FILES if (path := session.get_config_variable(name))]
        self._files = self._read_files()
        self._region = region or self._files.secret.region or session.get_config_variable("region") or _DEFAULT_REGION
        self._current = await self._find(self._files.secret, session)
        session.register_component("credential_provider", self)
        return self._files.secret

    async def load_credentials(self) -> "StoreCredentials":
        """What a botocore session asks its provider of credentials."""
        return self

    async def get_frozen_credentials(self) -> Any:
        """Return the credentials to sign with. Raises NoCredentialsError, or what botocore raises when it renews."""
        self._renewal.look()
        return await self._frozen()

    async def sign_again(
        self, response: tuple[Any, Mapping[str, Any]] | None, request_dict: dict[str, Any], **_: object
    ) -> int | None:
        """Handle botocore's event after each answer. Returns 0 to send a refused request again, at once, with new keys.

        The store has not acted on it, so this is safe for writes too.
        """
        context = request_dict["context"]
        refused = context.get(SIGNED_WITH)
        if response is None or refused is None or context.get(_SIGNED_AGAIN) or not refuses_keys(response[1]):
            return None
        if await self._frozen() == refused:
            await self._renewal.read_now()
        if await self._frozen() == refused:
            return None
        context[_SIGNED_AGAIN] = True
        return 0

    def close(self) -> None:
        self._renewal.close()

    async def _frozen(self) -> Any:
        if self._current is None:
            raise NoCredentialsError
        return await self._current.get_frozen_credentials()

    def _read_again(self, refused: bool) -> None:
        """Replace the credentials if there are others. If they cannot be read, those that are known stay."""
        try:
            files = self._read_files()
            if files == self._files and not self._is_worth_asking(refused):
                return
            # In a loop of its own, as the first time: it runs programs and asks metadata services.
            current = asyncio.run(self._find(files.secret, make_session(aws_files=self._aws_files)))
        except KeepstepError as error:
            self._say_problem(str(error))
        except (BotoCoreError, OSError, ValueError, LookupError, RuntimeError) as error:
            # Its text may hold what a credential_process printed.
            self._say_problem(f"the AWS chain fails with {type(error).__name__}")
        else:
            if current is None and self._current is not None:
                self._say_problem("the AWS chain finds none any more")
                return
            if files != self._files or _fixed(current) != _fixed(self._current):
                logger.info("credentials.renewed", source=self._directory or "the AWS chain")
            self._check_place(files.secret)
            self._problem = ""
            self._files, self._current = files, current

    def _is_worth_asking(self, refused: bool) -> bool:
        """Whether the AWS chain may give other credentials although the files are as they were.

        botocore itself renews those that expire. Programs and services are not asked at every refusal.
        """
        if self._files.secret.access_key or not (refused or self._current is None):
            return False
        if self._current is not None and _fixed(self._current) is None:
            return False
        now = time.monotonic()
        if self._asked_at and now - self._asked_at < LOOK_SECONDS:
            return False
        self._asked_at = now
        return True

    def _read_files(self) -> _Files:
        secret = read_secret(self._directory) if self._directory else SecretKeys()
        if secret.access_key:
            return _Files(secret=secret)
        return _Files(secret=secret, aws_files=tuple(map(_content, self._paths)))

    async def _find(self, secret: SecretKeys, session: Any) -> Any:
        """Return the credentials of the Secret, else those of the AWS chain; None if it finds none.

        A session reads ~/.aws once, so each time needs another.
        """
        session.set_config_variable("region", self._region)
        if secret.access_key:
            return AioCredentials(secret.access_key, secret.secret_key, secret.session_token or None)
        try:
            async with asyncio.timeout(_FIND_SECONDS):
                found = await session.get_component("credential_provider").load_credentials()
        except TimeoutError as error:
            raise KeepstepError(
                ErrorKind.BAD_CONFIGURATION,
                f"the AWS chain gave no credentials in {_FIND_SECONDS:g} s",
                hint="see whether the profile's credential_process hangs, or a service that gives credentials",
            ) from error
        if found is not None and _fixed(found) is None:
            # It keeps the session, to make clients that renew it.
            forget_other_services(session)
        return found

    def _check_place(self, secret: SecretKeys) -> None:
        """Say that a run stays where it is: its checkpoints would else be spread over two stores."""
        if (secret.endpoint_url, secret.region) != (self._files.secret.endpoint_url, self._files.secret.region):
            logger.warning(
                "credentials.other_store",
                secret=self._directory,
                consequence="its endpoint and region count from the next start on; the keys count now",
            )

    def _say_problem(self, problem: str) -> None:
        if problem != self._problem:
            logger.warning("credentials.unusable", error=problem, consequence="those that are known are used on")
        self._problem = problem


def _content(path: str) -> bytes:
    # What is no file, such as a pipe, can be read once, and that is for botocore. It also says what is wrong.
    with suppress(OSError):
        if (file := Path(path).expanduser()).is_file():
            return file.read_bytes()
    return b""


def _fixed(credentials: Any) -> tuple[str, ...] | None:
    """Return the credentials if they never expire; None if botocore renews them, or there are none."""
    if not isinstance(credentials, AioCredentials):
        return None
    return credentials.access_key, credentials.secret_key, credentials.token or ""


def make_session(*, aws_files: bool) -> Any:
    """Make a session of botocore that reads no file that nobody has asked for. `aws_files` is the setting."""
    session = get_session(None if aws_files else _NAMED_FILES_ONLY)
    if not aws_files:
        # ~/.boto and /etc/boto.cfg
        session.get_component("credential_provider").remove("boto-config")
    # A file in ~/.aws/models could name another endpoint, and other operations.
    paths = session.get_component("data_loader").search_paths
    paths[:] = [path for path in paths if path != Loader.CUSTOMER_DATA_PATH]
    return session


def forget_other_services(session: Any) -> None:
    """Drop botocore's list of the endpoints of other AWS services, which takes 7 MB.

    botocore falls back to rules for services that are not in its list.
    """
    for partition in session.get_component("data_loader").load_data("endpoints")["partitions"]:
        for service in partition["services"].keys() - _SERVICES:
            del partition["services"][service]
