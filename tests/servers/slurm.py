"""Slurm on loopback: the real controller, two nodes of two CPUs, and munge, in seconds. Needs root.

The nodes are two slurmd on this machine. Nothing is read or written outside `directory` but control groups, where this
machine has those that Slurm's proctrack/cgroup needs. Needs the Debian packages slurmctld, slurmd, slurm-client, munge.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from tests.harness.bounds import HANG_SECONDS
from tests.servers.process import Daemon, free_port, wait_until

_PROGRAMS: Final = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel", "srun")
_FREEZER: Final = Path("/sys/fs/cgroup/freezer")
_KILL_WAIT_SECONDS: Final = 600
"""Between SIGTERM and SIGKILL; twenty times Slurm's default, for this machine may be busy."""
_CONFIGURATION: Final = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job begins when its credential has expired.
AuthInfo=socket={directory}/munge.socket,cred_expire=8
CredType=cred/munge
StateSaveLocation={directory}/controller
SlurmdSpoolDir={directory}/%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/%n.pid
ProctrackType={process_tracking}
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait={kill_wait_seconds}
FirstJobId={first_job}
{nodes}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1
PartitionName=patient Nodes=ALL PriorityTier=1 GraceTime=600
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""


def missing_programs() -> list[str]:
    return [program for program in _PROGRAMS if not shutil.which(program)]


class SlurmCluster:
    """`directory` must be short: munge puts a unix socket into it. Jobs run in it, with `environment`."""

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        self._directory = directory
        self._daemons: list[Daemon] = []
        # Control groups are called by them, so no other cluster on this machine may have the same.
        name = f"m{secrets.token_hex(3)}"
        self._nodes = [f"{name}-{number}" for number in (1, 2)]
        self._environment = {**os.environ, **environment, "SLURM_CONF": str(directory / "slurm.conf")}

    def start(self) -> None:
        directory, host = self._directory, socket.gethostname()
        for name in ("controller", *self._nodes):
            (directory / name).mkdir()
        ports = [free_port() for _ in self._nodes]
        (directory / "slurm.conf").write_text(
            _CONFIGURATION.format(
                directory=directory,
                host=host,
                controller_port=free_port(),
                process_tracking="proctrack/cgroup" if self._has_freezer() else "proctrack/linuxproc",
                kill_wait_seconds=_KILL_WAIT_SECONDS,
                # Scripts make ports of it.
                first_job=free_port(),
                nodes="\n".join(
                    f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2"
                    for node, port in zip(self._nodes, ports, strict=True)
                ),
            )
        )
        (directory / "cgroup.conf").write_text(f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={_FREEZER.parent}\n")
        key = directory / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(1024))
        munge = [f"--{name}-file={directory}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        self._daemon("munged", "--foreground", "--force", f"--socket={directory}/munge.socket", *munge)
        wait_until((directory / "munge.socket").is_socket, "munged listens")
        self._daemon("slurmctld", "-D", "-i")
        for node in self._nodes:
            self._daemon("slurmd", "-D", "-N", node)
        wait_until(
            lambda: self._said("sinfo", "-h", "-N", "-t", "idle", "-p", "low").count("\n") == 2, "both nodes are idle"
        )

    def stop(self) -> None:
        """End all jobs, then the daemons."""
        with suppress(RuntimeError, subprocess.TimeoutExpired, TimeoutError):
            # SIGKILL to the steps, then to the batch script: else Slurm would wait between SIGTERM and SIGKILL.
            for job in self._said("squeue", "-h", "-o", "%A").split():
                self._ran("scontrol", "update", f"JobId={job}", "Requeue=0")
                self._ran("scancel", "--full", "--signal=KILL", job)
                self._ran("scancel", job)
            wait_until(lambda: not self.has_jobs(), "all jobs are over")
        for daemon in reversed(self._daemons):
            daemon.stop()
        for node in self._nodes:
            top = _FREEZER / f"slurm_{node}"
            for group in sorted([top, *top.rglob("*/")], reverse=True):
                _remove_group(group)

    def submit(self, script: Path, *options: str) -> str:
        """Submit the script; return the job's id."""
        return self.run("sbatch", "--parsable", *options, str(script)).strip()

    def run(self, program: str, *arguments: str) -> str:
        """Run one of Slurm's commands; return what it printed. Raises RuntimeError."""
        result = self._ran(program, *arguments)
        if result.returncode:
            raise RuntimeError(f"{program} {' '.join(arguments)}: {result.stderr[-2000:]}")
        return result.stdout

    def state(self, job: str) -> str:
        """Return the job's state, as RUNNING; of an array's task by `<job>_<task>`."""
        found = dict(
            word.split("=", 1) for word in self.run("scontrol", "-o", "show", "job", job).split() if "=" in word
        )
        return found["JobState"]

    def has_jobs(self) -> bool:
        return bool(self.run("squeue", "-h"))

    def logs(self) -> str:
        """Return what daemons and jobs have written, for the message of a failed test."""
        files = sorted(self._directory.glob("*.out"))
        return "\n".join(f"== {file.name}\n{file.read_text(errors='replace')[-6000:]}" for file in files)

    def _has_freezer(self) -> bool:
        """Whether Slurm can follow processes by control groups. Those of the second version would need systemd."""
        if not (_FREEZER / "cgroup.procs").exists():
            return False
        try:
            (_FREEZER / f"slurm_{self._nodes[0]}").mkdir()
        except OSError:
            return False
        return True

    def _daemon(self, program: str, *arguments: str) -> None:
        log = self._directory / f"{program}-{len(self._daemons)}.out"
        self._daemons.append(Daemon([program, *arguments], log, self._environment))

    def _said(self, program: str, *arguments: str) -> str:
        """What it printed, if anything: the controller may not answer yet."""
        return self._ran(program, *arguments).stdout

    def _ran(self, program: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [program, *arguments],
            cwd=self._directory,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
            check=False,
        )


def _remove_group(group: Path) -> None:
    """Remove a control group that slurmd has left, with what still runs in it."""

    def is_empty() -> bool:
        pids = (group / "cgroup.procs").read_text().split()
        for pid in map(int, pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not pids

    with suppress(FileNotFoundError):
        wait_until(is_empty, f"{group} is empty")
        group.rmdir()
