#!/bin/bash
# Several nodes: srun starts one `keepstep run` on each, and torchrun starts the ranks beside its agent.
#SBATCH --nodes=2 --ntasks-per-node=1
#SBATCH --requeue --open-mode=append
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120

# This script runs on the first of the nodes.
rendezvous="$(hostname):$((20000 + SLURM_JOB_ID % 10000))"
srun keepstep run --grace-seconds 110 --to "${RUNS:-s3://bucket/runs}/nodes" -- \
    torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "${GPUS_PER_NODE:-1}" \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$rendezvous" train.py
code=$?
# 143: told to stop, and all is saved. 75: the newest checkpoint is not stored, the next start stores it if it can.
case "$code" in 143 | 75) scontrol requeue "$SLURM_JOB_ID" ;; esac
exit "$code"
