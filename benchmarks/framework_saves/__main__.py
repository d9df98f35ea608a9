"""How long training in five frameworks waits for a save of 1 GiB, alone and with Keepstep, and what else it costs.

    python -m benchmarks.framework_saves [--rounds 1] [--framework NAME …]

All ways take turns, each in processes of their own, so that what else the machine does meets all alike. Writes
benchmarks/FRAMEWORK_SAVES.md and the plot beside it, and exits 1 if a goal is missed. Needs 16 GiB of memory and 8 GiB
of free disk below the temporary directory; a round takes half an hour on two cores.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from typing import Any, Final

from benchmarks.framework_saves.program import FRAMEWORKS
from benchmarks.framework_saves.report import ALONE, KEEPSTEP, SAVE_EVERY, Runs, missed, plot, report
from tests.servers.process import free_port

from keepstep_api import names

_FRAMEWORKS: Final = tuple(framework for framework in FRAMEWORKS if framework != "plain")
_STEPS: Final = {(1, ALONE): 45, (1, KEEPSTEP): 125, (2, ALONE): 45, (2, KEEPSTEP): 45}
"""By how many ranks and which way."""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--framework", action="append", choices=_FRAMEWORKS)
    options = parser.parse_args()
    runs: Runs = {}
    for framework in options.framework or _FRAMEWORKS:
        for _ in range(options.rounds):
            for (ranks, way), steps in _STEPS.items():
                runs.setdefault((framework, ranks, way), []).append(_trained(framework, way, steps, ranks=ranks))
        # A page after each framework: a round takes long.
        report(runs, options.rounds)
    plot(runs)
    print(*missed(runs), sep="\n", flush=True)
    return int(bool(missed(runs)))


def _trained(framework: str, way: str, steps: int, *, ranks: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="framework-saves-") as folder:
        port = free_port()
        arguments = [framework, folder, str(steps), str(SAVE_EVERY), *(["--keepstep"] if way == KEEPSTEP else [])]
        processes = []
        for rank in range(ranks):
            environment = {
                **os.environ,
                names.ENV_VOLUME: folder,
                **{"RANK": str(rank), "LOCAL_RANK": str(rank)},
                **{"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)},
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"},
                **({"OMP_NUM_THREADS": "1"} if ranks > 1 else {}),
            }
            command = [sys.executable, "-m", "benchmarks.framework_saves.program", *arguments]
            processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"{framework}, {way}, {ranks} ranks: a rank failed")
    measured: dict[str, Any] = json.loads(outputs[0].splitlines()[-1])
    print(framework, way, f"ranks={ranks}", f"saves={[round(one, 2) for one in measured['saves']]}", flush=True)
    return measured


if __name__ == "__main__":
    sys.exit(main())
