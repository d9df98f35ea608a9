"""What Slurm tells `keepstep run`: which job this is, how often it was started, and which of its tasks this one is.

All of it is defaults. What a flag, a variable or the settings file says comes first.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from keepstep_api.names import RUN_VOLUME


def slurm_defaults(environment: Mapping[str, str]) -> dict[str, object]:
    """Return defaults of the settings, by name, for a task of a Slurm job; none outside of one.

    Tasks that run at the same time get volumes of their own, because they often share the directory that they start
    in: the tasks of an array, and those of a step. The tasks of a step are one run, as the pods of a job are, so they
    resume from the same checkpoint. Each start of a job and each of its steps is an attempt.
    """
    job = _digits(environment, "SLURM_JOB_ID")
    if not job:
        return {}
    array_task, task = _digits(environment, "SLURM_ARRAY_TASK_ID"), _task_of_many(environment)
    volume = RUN_VOLUME
    volume += f"-array-{array_task}" if array_task else ""
    volume += f"-task-{task}" if task else ""
    defaults: dict[str, object] = {"volume": volume}
    if task:
        step, restarts = _digits(environment, "SLURM_STEP_ID"), _digits(environment, "SLURM_RESTART_COUNT") or "0"
        defaults |= {"attempt": f"slurm-{job}-{step}-{restarts}", "place": task, "node_rank": task}
    return defaults


def slurm_facts(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what the log says of this job, by field; nothing outside of one."""
    names = {"job": "JOB_ID", "array_task": "ARRAY_TASK_ID", "restarts": "RESTART_COUNT", "task": "PROCID"}
    if not _digits(environment, "SLURM_JOB_ID"):
        return {}
    return {field: text for field, name in names.items() if (text := _digits(environment, f"SLURM_{name}"))}


def launcher_problem(command: Sequence[str]) -> str:
    """Return what is wrong with a command that starts its processes elsewhere than beside the agent; empty: nothing."""
    if Path(command[0]).name != "srun":
        return ""
    return (
        "srun starts the program on other nodes, where no agent is, and kills it at a SIGTERM before it can save: "
        "write srun before keepstep, as in: srun keepstep run --to DEST -- python train.py"
    )


def _task_of_many(environment: Mapping[str, str]) -> str:
    """Return the number of this task in its step; empty if the step has one task, or if this is the batch script."""
    if (_digits(environment, "SLURM_STEP_NUM_TASKS") or "1") == "1":
        return ""
    return _digits(environment, "SLURM_PROCID")


def _digits(environment: Mapping[str, str], name: str) -> str:
    text = environment.get(name, "")
    return text if text.isascii() and text.isdecimal() else ""
