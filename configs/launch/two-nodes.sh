#!/usr/bin/env bash
# One rank per GPU on this machine, of a job that spans several machines. Run it once on each machine; arguments go to `firebrick train`.
#
#   FIREBRICK_JOB_TOKEN=... NODES=2 NODE=0 GPUS=8 MASTER_ADDR=10.0.0.1 configs/launch/two-nodes.sh --config h100.toml
#
# NODE is 0 on the machine whose address MASTER_ADDR is. TRAIN is the program; all machines need the same one.
set -euo pipefail
: "${FIREBRICK_JOB_TOKEN:?set the same secret on all machines: export FIREBRICK_JOB_TOKEN=\$(openssl rand -hex 16)}"
: "${NODES:?the number of machines}" "${NODE:?the number of this machine, from 0}" "${GPUS:?the GPUs of each machine}"
: "${MASTER_ADDR:?the address of machine 0}"
export FIREBRICK_JOB_TOKEN MASTER_ADDR MASTER_PORT="${MASTER_PORT:-29500}"
export WORLD_SIZE=$((NODES * GPUS)) LOCAL_WORLD_SIZE=$GPUS

ranks=()
# A signal to this script reaches all ranks, which then save and end together.
for signal in INT TERM USR1; do
  trap 'kill -'"$signal"' "${ranks[@]}" 2>/dev/null || true' "$signal"
done
for ((local = 0; local < GPUS; local++)); do
  RANK=$((NODE * GPUS + local)) LOCAL_RANK=$local "${TRAIN:-./firebrick}" train "$@" &
  ranks+=($!)
done

status=0
for rank in "${ranks[@]}"; do
  # A trapped signal interrupts `wait`; the rank is waited for again.
  while true; do
    ended=0
    wait "$rank" || ended=$?
    kill -0 "$rank" 2>/dev/null || break
  done
  ((status != 0)) || status=$ended
done
exit "$status"
