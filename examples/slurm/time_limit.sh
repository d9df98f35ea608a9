#!/bin/bash
# A training that is longer than its time limit: it saves two minutes before the limit, and the job requeues itself.
#SBATCH --requeue --open-mode=append
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120

# Without B: in --signal, the steps get the SIGTERM and this shell does not.
srun keepstep run --grace-seconds 110 --to "${RUNS:-s3://bucket/runs}/long" -- python train.py
code=$?
# 143: told to stop, and all is saved. 75: the newest checkpoint is not stored, the next start stores it if it can.
case "$code" in 143 | 75) scontrol requeue "$SLURM_JOB_ID" ;; esac
exit "$code"
