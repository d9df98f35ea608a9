"""How long the API server waits for the webhook: 200 reviews a second over TLS, with the webhook on one core.

    python -m benchmarks.webhook

Reviews are sent when they are due, whether or not earlier ones are answered, and their time counts from then. Writes
benchmarks/WEBHOOK.md, and exits 1 if the goal is missed. The load runs on the machine's other cores.
"""

import asyncio
import json
import math
import os
import platform
import ssl
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import aiohttp
from tests.harness.webhook_process import WebhookProcess, review_of, training_pod

RATE: Final = 200
"""Reviews per second."""
SECONDS: Final = 30
WARM_UP_SECONDS: Final = 3
CONNECTIONS: Final = 4
"""As of as many API servers; one asks over one connection, HTTP/1.1 here."""
GOAL_SECONDS: Final = 0.010
REPORT: Final = Path(__file__).with_name("WEBHOOK.md")
_CLOCK_TICKS: Final = os.sysconf("SC_CLK_TCK")


def main() -> int:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[1:] or cores)
    with (
        tempfile.TemporaryDirectory(prefix="webhook-") as folder,
        WebhookProcess(Path(folder), launcher=("taskset", "--cpu-list", str(cores[0]))) as webhook,
    ):
        asyncio.run(_load(webhook, WARM_UP_SECONDS))
        before = _cpu_seconds(webhook.process.pid)
        latencies = asyncio.run(_load(webhook, SECONDS))
        cpu_seconds = _cpu_seconds(webhook.process.pid) - before
    return _report(sorted(latencies), cpu_seconds, len(cores))


async def _load(webhook: WebhookProcess, seconds: float) -> list[float]:
    """The latencies. Raises if a review is not answered with a patch."""
    body = json.dumps(review_of(training_pod())).encode()
    context = ssl.create_default_context(cafile=webhook.authority)
    connector = aiohttp.TCPConnector(limit=CONNECTIONS, ssl=context)
    async with aiohttp.ClientSession(connector=connector, headers={"Content-Type": "application/json"}) as session:

        async def ask(due: float) -> float:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            async with session.post(f"https://127.0.0.1:{webhook.port}/mutate", data=body) as answer:
                response = json.loads(await answer.read())["response"]
            assert response["patch"], response
            return time.perf_counter() - due

        begin = time.perf_counter() + 0.1
        return await asyncio.gather(*(ask(begin + number / RATE) for number in range(int(seconds * RATE))))


def _cpu_seconds(pid: int) -> float:
    """User and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _CLOCK_TICKS


def _report(latencies: list[float], cpu_seconds: float, cores: int) -> int:
    met = _percentile(latencies, 99) <= GOAL_SECONDS
    figures = {f"p{share:g}": _percentile(latencies, share) for share in (50, 90, 99, 99.9)} | {"most": latencies[-1]}
    lines = [
        "# How long the API server waits for the webhook",
        "",
        "Made by `make bench` (`benchmarks/webhook.py`); do not edit.",
        "",
        f"{RATE} reviews of an annotated pod a second for {SECONDS} s, over {CONNECTIONS} TLS connections; the webhook",
        f"on one of {cores} cores ({platform.machine()}, Python {platform.python_version()}), the load on the others.",
        f"At its end the machine had {os.getloadavg()[0]:.1f} processes to run.",
        "",
        "| latency | ms |",
        "|---|---|",
        *(f"| {name} | {1e3 * seconds:.2f} |" for name, seconds in figures.items()),
        "",
        f"A review takes {1e3 * cpu_seconds / len(latencies):.2f} ms of CPU.",
        "",
        "| goal | measured | met |",
        "|---|---|---|",
        f"| p99 ≤ {1e3 * GOAL_SECONDS:.0f} ms | {1e3 * _percentile(latencies, 99):.2f} ms | {'yes' if met else 'no'} |",
    ]
    REPORT.write_text("\n".join(lines) + "\n")
    print(REPORT.read_text())
    return 0 if met else 1


def _percentile(ordered: list[float], share: float) -> float:
    return ordered[max(0, math.ceil(share / 100 * len(ordered)) - 1)]


if __name__ == "__main__":
    sys.exit(main())
