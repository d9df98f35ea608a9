#!/bin/bash
# One node, no srun. Preempted or requeued, the program saves, and goes on from there when the job starts again.
#SBATCH --requeue --open-mode=append
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@120

# exec: Slurm kills all that the batch shell has started once that shell is gone, and a SIGTERM ends a shell at once.
exec keepstep run --grace-seconds 110 --to "${RUNS:-s3://bucket/runs}/one" -- python train.py
