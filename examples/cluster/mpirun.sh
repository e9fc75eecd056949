#!/bin/bash
# Ranks on several hosts by Open MPI, which logs in to each by ssh.
#
#   examples/cluster/mpirun.sh HOST0:2,HOST1:2 shoal train --model cnn --data fashion-mnist --epochs 1
#
# First argument: names or addresses by which the hosts reach each other, each with its number of ranks. Rank 0 is on the first
# one. Programs and data must lie at the same place on all of them.
set -eu
hosts=${1:?usage: mpirun.sh HOST0:RANKS,HOST1:RANKS COMMAND}
shift
first=${hosts%%,*}
SHOAL_SECRET=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export SHOAL_SECRET MASTER_ADDR=${MASTER_ADDR:-${first%:*}} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec mpirun --host "$hosts" -x SHOAL_SECRET -x MASTER_ADDR -x OMP_NUM_THREADS -x PATH ${LD_LIBRARY_PATH:+-x LD_LIBRARY_PATH} "$@"
