#!/bin/bash
# An array: each of its tasks is a run, with a destination and a volume of its own.
#SBATCH --array=1-2
#SBATCH --requeue --open-mode=append
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@120

exec keepstep run --grace-seconds 110 --to "${RUNS:-s3://bucket/runs}/sweep-$SLURM_ARRAY_TASK_ID" -- python train.py
