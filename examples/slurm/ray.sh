#!/usr/bin/env bash
# One run over several nodes by Ray: the first node is Ray's head, the others join it, and the run joins the cluster.
#
#     sbatch examples/slurm/ray.sh configs/grpo_tiny.yaml grpo.max_num_steps=20
#
# This folder and those for checkpoints and logs must be shared by the nodes.
#SBATCH --job-name=nemo-rl-cpp-ray
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --time=04:00:00
#SBATCH --requeue
set -euo pipefail

config=${1:?usage: sbatch ray.sh CONFIG [overrides]}
shift
workers_per_node=${WORKERS_PER_NODE:-2}

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{print $1}')
port=$((20000 + SLURM_JOB_ID % 20000))
export RAY_ADDRESS="$address:$port"
cpus=${SLURM_CPUS_PER_TASK:-1}
export SRUN_CPUS_PER_TASK=$cpus    # srun does not take it from sbatch by itself

# --block keeps ray in the foreground of its step, so that it ends with the job
srun --nodes=1 --ntasks=1 --nodelist="$head" --overlap \
  uv run --no-sync ray start --head --node-ip-address="$address" --port="$port" --num-cpus="$cpus" --include-dashboard=false --block &
for node in "${nodes[@]:1}"; do
  srun --nodes=1 --ntasks=1 --nodelist="$node" --overlap \
    uv run --no-sync ray start --address="$RAY_ADDRESS" --num-cpus="$cpus" --block &
done

# until all nodes have joined; after two minutes the run says what is missing
for _ in $(seq 60); do
  there=$(srun --nodes=1 --ntasks=1 --nodelist="$head" --overlap \
    uv run --no-sync python -c 'import ray; ray.init(address="auto", logging_level="error"); print(len(ray.nodes()))' || echo 0)
  [ "$there" -ge "${#nodes[@]}" ] && break
  sleep 2
done

srun --nodes=1 --ntasks=1 --nodelist="$head" --overlap --kill-on-bad-exit=1 \
  uv run --no-sync nemo-rl-cpp train --config "$config" \
  cluster.executor=ray \
  cluster.num_nodes="${#nodes[@]}" \
  cluster.gpus_per_node="$workers_per_node" \
  cluster.cpus_per_worker="$((cpus / workers_per_node))" \
  "$@"
