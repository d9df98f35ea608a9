"""The cloud identity that another webhook gave to the trainer, for our containers too.

Such a webhook may have run before ours and so never seen our containers. What it wrote is copied: variables that name
a role and a token, and the mount on which the token lies. Nothing of it is a secret by itself.
"""

from collections.abc import Mapping
from typing import Any, Final

from mooring_agent.core.injection.pod_shape import present
from mooring_agent.core.injection.trainer_container import Container, mount_above, variable

_TOKEN_FILES: Final = ("AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE")
_VARIABLES: Final = (
    "AWS_ROLE_ARN",
    "AWS_ROLE_SESSION_NAME",
    *_TOKEN_FILES,
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_STS_REGIONAL_ENDPOINTS",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
)


def identity_variables(trainer: Container) -> list[dict[str, Any]]:
    """Entries of `env`; none where the trainer has no such identity."""
    if not any(variable(trainer, name) for name in _TOKEN_FILES):
        return []
    return [dict(entry) for name in _VARIABLES if (entry := variable(trainer, name)) is not None]


def identity_mounts(trainer: Container) -> list[Mapping[str, Any]]:
    """The mounts on which the tokens lie, each once."""
    mounts: list[Mapping[str, Any]] = []
    for name in _TOKEN_FILES:
        path = present(variable(trainer, name) or {}, "value", "")
        mount = mount_above(present(trainer, "volumeMounts", []), path) if path else None
        if mount is not None and mount not in mounts:
            mounts.append(mount)
    return mounts
