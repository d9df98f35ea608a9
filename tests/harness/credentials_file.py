"""~/.aws/credentials as people and programs rewrite it, and keys that a store has replaced."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.servers.fault_proxy import FaultProxy
from tests.servers.faults import Fault, Rule
from tests.servers.server import ACCESS_KEY, NEXT_ACCESS_KEY, NEXT_SECRET_KEY, SECRET_KEY

FIRST_KEYS: Final = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
NEXT_KEYS: Final = {"AWS_ACCESS_KEY_ID": NEXT_ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": NEXT_SECRET_KEY}
_UNKNOWN: Final = b"<Error><Code>InvalidAccessKeyId</Code></Error>"


def write_credentials(path: Path, keys: Mapping[str, str]) -> None:
    """Replace the file, as `aws configure` and login helpers do."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.write_text("\n".join(["[default]", *(f"{name.lower()} = {text}" for name, text in keys.items()), ""]))
    fresh.replace(path)


def refuse_first_keys(proxy: FaultProxy, *, status: int = 403, body: bytes = _UNKNOWN) -> None:
    """From now on the store knows the next keys alone. Each refusal is a hit of `old`."""
    proxy.add(Rule(name="old", fault=Fault.STATUS, status=status, body=body, signed_with=ACCESS_KEY, times=-1))
