#!/bin/bash
# Trains on two nodes under SLURM:   sbatch examples/launch/slurm.sh [arguments of train.py]
#
# One task per node takes all devices of its node; one per device (--ntasks-per-node=8) takes one each.
# Without `srun` the script would run once, on the first node, and initialize_distributed would say so.
#SBATCH --job-name=redco
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --output=%x-%j.out
#SBATCH --signal=TERM@120
# (SIGTERM two minutes before the time limit: fit ends at a step that all processes agree on.)
# On GPUs, say:  #SBATCH --gpus-per-node=8

srun --label --kill-on-bad-exit=1 "${PYTHON:-python}" "${SCRIPT:-examples/launch/train.py}" "$@"
