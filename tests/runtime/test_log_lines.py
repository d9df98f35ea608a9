"""Lines on a stderr that others write to as well, as the program of a run does."""

import json
import os
import subprocess
import sys

import pytest
from tests.harness.bounds import HANG_SECONDS

_LOG = """
import structlog
from tests.harness.bounds import HANG_SECONDS
from keepstep_agent.runtime.engine.logs import configure_logs
configure_logs({log_format!r})
structlog.get_logger().info("agent.serving", volume="/volume")
"""
_SAY = """
from keepstep_agent.runtime.engine.logs import say
say("keepstep: not durable: step 7")
"""


@pytest.mark.parametrize(
    "program",
    [_LOG.format(log_format="json"), _LOG.format(log_format="console"), _SAY],
    ids=["json", "console", "for people"],
)
def test_a_line_and_its_end_are_one_write(program: str) -> None:
    # A pipe of packets keeps each write apart.
    reader, writer = os.pipe2(os.O_DIRECT)
    with os.fdopen(reader, "rb", buffering=0) as written:
        with os.fdopen(writer, "wb") as stderr:
            subprocess.run([sys.executable, "-c", program], stderr=stderr, check=True, timeout=HANG_SECONDS)
        line = written.read(4096)
        assert line.endswith(b"\n")
        assert written.read(4096) == b""


_WARN = """
import warnings
from keepstep_agent.runtime.engine.logs import configure_logs
configure_logs("json")
warnings.warn("a library is unhappy", RuntimeWarning)
"""


_COMPLAIN = """
import asyncio, logging
from keepstep_agent.runtime.engine.logs import configure_logs
configure_logs("json")
logging.getLogger("a.library").warning("%s is slow", "it")
logging.getLogger("a.library").info("not worth a line")

async def main():
    async def fails():
        raise ValueError("nobody waits for this")
    asyncio.create_task(fails())
    await asyncio.sleep(0)

asyncio.run(main())
"""


def test_what_libraries_log_are_lines_like_others() -> None:
    command = (sys.executable, "-c", _COMPLAIN)
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=True)
    slow, lost = map(json.loads, ended.stderr.splitlines())
    assert (slow["event"], slow["level"], slow["library"]) == ("python.log", "warning", "a.library")
    assert slow["message"] == "it is slow"
    assert (lost["event"], lost["level"], lost["library"]) == ("python.log", "error", "asyncio")
    assert "ValueError: nobody waits for this" in lost["exception"]


def test_a_warning_of_pythons_is_a_line_like_others() -> None:
    command = (sys.executable, "-c", _WARN)
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=True)
    line = json.loads(ended.stderr)
    assert (line["event"], line["level"], line["kind"]) == ("python.warning", "warning", "RuntimeWarning")
    assert line["message"] == "a library is unhappy"


_PASSWORDS = """
import logging
import structlog
from keepstep_agent.core.errors import ErrorKind, StoreError
from keepstep_agent.runtime.engine.logs import configure_logs, say
configure_logs({log_format!r})
url = "https://user:hunter2@store.example:9000/a@b"
structlog.get_logger().warning("tls.not_verified", endpoint=url, error=f"no answer from {{url}}")
logging.getLogger("a.library").warning("cannot reach %s", url)
error = StoreError(ErrorKind.UNREACHABLE, f"no answer from {{url}}", hint=f"check {{url}}")
say(f"{{error}} {{error.hint}} {{error.__notes__}} {{url}}")
try:
    raise ValueError(f"Invalid endpoint: {{url}}")
except ValueError:
    structlog.get_logger().exception("monitor.failed")
"""


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_no_line_and_no_error_has_the_password_of_a_url(log_format: str) -> None:
    program = _PASSWORDS.format(log_format=log_format)
    line = [sys.executable, "-c", program]
    done = subprocess.run(line, capture_output=True, text=True, check=True, timeout=HANG_SECONDS)
    assert "hunter2" not in done.stderr
    assert "user:" not in done.stderr
    # Twice in the first line, once in the library's, four times for people, once in the traceback.
    assert done.stderr.count("https://store.example:9000/a@b") >= 8
