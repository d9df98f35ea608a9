#!/bin/bash
# One task per GPU, no torchrun: each task has an agent and a volume of its own, and all of them are one run.
#SBATCH --nodes=1 --ntasks-per-node=2
#SBATCH --requeue --open-mode=append
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120

export MASTER_ADDR="$(hostname)" MASTER_PORT="$((20000 + SLURM_JOB_ID % 10000))"
export RUN="${RUNS:-s3://bucket/runs}/tasks"
# In single quotes: each task puts in its own numbers.
srun bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_STEP_NUM_TASKS \
    exec keepstep run --grace-seconds 110 --to "$RUN" -- python train.py'
code=$?
# 143: told to stop, and all is saved. 75: the newest checkpoint is not stored, the next start stores it if it can.
case "$code" in 143 | 75) scontrol requeue "$SLURM_JOB_ID" ;; esac
exit "$code"
