"""The CPU and memory that control groups allow, in both versions of the kernel's interface."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.harness.agent_process import AgentProcess, wait_until
from tests.harness.bounds import HANG_SECONDS
from tests.harness.control_group import ControlGroup, NoControlGroup, cpu_control_group

from keepstep_agent.adapters.control_group import cpu_limit, memory_limit_bytes

HALF_A_CPU = "CPU limit 500m: at most about 0.42 GB/s over TLS"


@pytest.fixture
def half_a_cpu() -> Iterator[ControlGroup]:
    try:
        with cpu_control_group(0.5) as group:
            yield group
    except NoControlGroup as reason:
        pytest.skip(str(reason))


@pytest.mark.root
def test_doctor_says_the_rate_that_a_real_limit_allows(half_a_cpu: ControlGroup, tmp_path: Path) -> None:
    doctor = [sys.executable, "-m", "keepstep_agent", "doctor", "--json", f"file://{tmp_path}/destination"]
    said = subprocess.run(half_a_cpu.wrap(doctor), capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    found = {finding["name"]: finding for finding in json.loads(said.stdout)}
    assert found["cpu"]["detail"] == HALF_A_CPU
    assert "keepstep.dev/cpu" in found["cpu"]["hint"]


@pytest.mark.root
def test_an_agent_with_a_real_limit_says_the_rate_when_it_starts(half_a_cpu: ControlGroup, tmp_path: Path) -> None:
    agent = AgentProcess(tmp_path / "volume", f"file://{tmp_path}/destination", warm=False)
    with half_a_cpu.inside():
        agent.start(wait=False)
    with contextlib.ExitStack() as stack:
        stack.callback(agent.kill)
        agent.wait_serving()
        wait_until(lambda: bool(agent.log("cpu.limited")), HANG_SECONDS, "the agent says its limit")
        assert [line["limit"] for line in agent.log("cpu.limited")] == [HALF_A_CPU]


def said(tmp_path: Path, lines: str, files: dict[str, str]) -> str | None:
    ours, root = tmp_path / "cgroup", tmp_path / "fs"
    ours.write_text(lines)
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    limit = cpu_limit(ours=ours, control_groups=root)
    return None if limit is None else str(limit)


@pytest.mark.parametrize(
    ("lines", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "50000 100000\n"}, "CPU limit 500m: at most about 0.42 GB/s over TLS"),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/kubepods/pod1/agent\n", {"cpu.max": "200000 100000\n"}, "CPU limit 2: at most about 1.7 GB/s over TLS"),
        (
            "0::/a/b\n",
            {"a/cpu.max": "25000 100000\n", "a/b/cpu.max": "max 100000\n"},
            "CPU limit 250m: at most about 0.21 GB/s over TLS",
        ),
        (
            "4:cpu,cpuacct:/a\n0::/\n",
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "150000\n", "cpu,cpuacct/a/cpu.cfs_period_us": "100000\n"},
            "CPU limit 1.5: at most about 1.3 GB/s over TLS",
        ),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ("garbage\n", {"cpu.max": "50000 100000\n"}, None),
        ("0::/\n", {"cpu.max": "what\n"}, None),
    ],
)
def test_the_limit_says_which_upload_rate_it_allows(
    tmp_path: Path, lines: str, files: dict[str, str], expected: str | None
) -> None:
    assert said(tmp_path, lines, files) == expected


def test_where_nobody_says_anything_there_is_no_limit(tmp_path: Path) -> None:
    assert cpu_limit(ours=tmp_path / "none", control_groups=tmp_path) is None


@pytest.mark.parametrize(
    ("lines", "files", "expected"),
    [
        ("0::/\n", {"memory.max": "268435456\n"}, 268435456),
        ("0::/\n", {"memory.max": "max\n"}, None),
        ("0::/a/b\n", {"a/memory.max": "1000\n", "a/b/memory.max": "2000\n"}, 1000),
        ("7:memory:/a\n0::/\n", {"memory/a/memory.limit_in_bytes": "1000\n"}, 1000),
        ("7:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, None),
        ("garbage\n", {"memory.max": "1000\n"}, None),
        ("0::/\n", {"memory.max": "what\n"}, None),
    ],
)
def test_the_memory_limit_is_the_tightest_of_ours_and_those_above(
    tmp_path: Path, lines: str, files: dict[str, str], expected: int | None
) -> None:
    said(tmp_path, lines, files)
    assert memory_limit_bytes(ours=tmp_path / "cgroup", control_groups=tmp_path / "fs") == expected
