#!/bin/bash
# Ranks on several hosts by torchrun: this command on each of them, with the host's number.
#
#   examples/cluster/torchrun.sh HOST0 2 NUMBER 4 shoal train --model cnn --data fashion-mnist --epochs 1
#
# HOST0: name or address of host 0, by which the others reach it; number of hosts; number of this one, from 0; ranks on
# each; command. SHOAL_SECRET should be the same secret on all hosts (openssl rand -hex 32); see SECURITY.md.
set -eu
if [ $# -lt 5 ]; then
  echo "usage: torchrun.sh HOST0 HOSTS NUMBER RANKS COMMAND" >&2
  exit 2
fi
host0=$1 hosts=$2 number=$3 ranks=$4
shift 4
exec torchrun --no-python --nnodes "$hosts" --node-rank "$number" --nproc-per-node "$ranks" \
  --master-addr "$host0" --master-port "${MASTER_PORT:-29500}" "$@"
