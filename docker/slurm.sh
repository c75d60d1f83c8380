#!/usr/bin/env bash
#SBATCH --nodes=2 --ntasks-per-node=1 --exclusive
#
# A Ray cluster on the nodes of a Slurm job, and a run on it: sbatch docker/slurm.sh experiment=... [key=value ...]
# Submit it from the checkout, in a folder that all nodes see. Each node has SLOTS ranks (default: its cores).
set -euo pipefail
readonly PORT=6379 SLOTS="${SLOTS:-$SLURM_CPUS_ON_NODE}"
export PATH="$PWD/.venv/bin:$PATH"

# Ray admits whoever has the token in ~/.ray, which all nodes of most Slurm clusters see; and its workers are nice by 15.
export RAY_AUTH_MODE=token RAY_worker_niceness=0
ray get-auth-token --generate >/dev/null

# A job that was started by `ray start --block` ends with its step, so Ray is gone when this script ends.
start() { srun --nodes="$1" --ntasks="$1" "${@:2}" & }

head="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)"
start 1 -w "$head" ray start --head --port="$PORT" --block
until ray status --address="$head:$PORT" >/dev/null 2>&1; do sleep 2; done
if [ "$SLURM_NNODES" -gt 1 ]; then
  start "$((SLURM_NNODES - 1))" -x "$head" ray start --address="$head:$PORT" --block
fi
python train.py "$@" cluster=ray cluster.address="$head:$PORT" runner.output_dir="$PWD/results" \
  "+cluster.node_groups={node: {nodes: $SLURM_NNODES, slots: $SLOTS}}"
