#!/usr/bin/env bash
# One run over several nodes without Ray: srun starts the ranks, the run finds them by SLURM_PROCID and SLURM_NTASKS.
#
#     sbatch examples/slurm/srun.sh configs/grpo_tiny.yaml grpo.max_num_steps=20
#
# This folder must be shared by the nodes.
#SBATCH --job-name=nemo-rl-cpp
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --signal=USR1@300
set -euo pipefail

config=${1:?usage: sbatch srun.sh CONFIG [overrides]}
shift

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}

# --kill-on-bad-exit: when a rank is lost, the rest of the step ends too. A requeued job resumes from the newest checkpoint.
srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
  uv run --no-sync nemo-rl-cpp train --config "$config" \
  cluster.executor=processes \
  cluster.num_nodes="$SLURM_JOB_NUM_NODES" \
  cluster.gpus_per_node="$((SLURM_NTASKS / SLURM_JOB_NUM_NODES))" \
  cluster.cpus_per_worker="${SLURM_CPUS_PER_TASK:-1}" \
  "$@"
