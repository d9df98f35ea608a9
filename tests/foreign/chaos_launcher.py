"""Starts the ranks of a program, with the events of ckpt-chaos in them alone; with rank 0 all end.

    chaos_launcher.py RANKS PROGRAM ARGUMENT …

ckpt-chaos counts the file operations of the first Python process that it meets, which would be this one: what tells it
to is in another variable until the ranks begin.
"""

import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.servers.process import free_port

HIDDEN = "CHAOS_WATCH"


def main() -> int:
    ranks = int(sys.argv[1])
    environment = dict(os.environ)
    if watched := environment.pop(HIDDEN, ""):
        environment["CKPT_CHAOS_WATCH"] = watched
    port = str(free_port())
    processes = []
    for rank in range(ranks):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
        own = {**environment, **(place if ranks > 1 else {})}
        processes.append(subprocess.Popen([sys.executable, *sys.argv[2:]], env=own))
    code = processes[0].wait()
    for process in processes[1:]:
        if code != 0:
            process.kill()
        code = code or process.wait()
    return code


if __name__ == "__main__":
    sys.exit(main())
