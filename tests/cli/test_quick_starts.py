"""A start loads only what it needs: training waits for the command, and then for the restore."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.harness.bounds import HANG_SECONDS

# What takes longer to load than all that the two need together.
HEAVY = (
    "keepstep_agent.core.agent",
    "keepstep_agent.runtime.work",
    "aiobotocore",
    "prometheus_client",
    "rich",
    "torch",
)
_LOADED_WHEN_IT_STARTS_A_PROCESS = """
import asyncio, sys
async def tell(*command, **options):
    print(*(name for name, module in sys.modules.items() if module))
    sys.stdout.flush()
    raise SystemExit(0)
asyncio.create_subprocess_exec = tell
from keepstep_agent.__main__ import main
main()
"""
# The command may leave by `os._exit`, if a store's thread is about to end.
_LOADED_AT_ITS_END = """
import os, sys
def leave(code):
    print(*(name for name, module in sys.modules.items() if module))
    sys.stdout.flush()
    left(code)
left, os._exit = os._exit, leave
from keepstep_agent.__main__ import main
try:
    main()
finally:
    leave(0)
"""


@pytest.mark.parametrize(
    ("program", "command", "also"),
    [
        (_LOADED_WHEN_IT_STARTS_A_PROCESS, ("run", "--to"), ()),
        (_LOADED_AT_ITS_END, ("restore",), ("grpc", "google.protobuf")),
    ],
    ids=["run", "restore"],
)
def test_what_training_waits_for_loads_no_more_than_it_needs(
    program: str, command: tuple[str, ...], also: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "bucket").mkdir()
    words = [*command, f"file://{tmp_path}/bucket", "--volume", str(tmp_path / "volume")]
    done = subprocess.run(
        [sys.executable, "-c", program, *words, *(["--", "true"] if command[0] == "run" else [])],
        env={name: value for name, value in os.environ.items() if not name.startswith("KEEPSTEP_")},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    loaded = done.stdout.split()
    assert "keepstep_agent.config" in loaded, done.stderr
    assert [name for name in loaded if name.startswith((*HEAVY, *also))] == []
