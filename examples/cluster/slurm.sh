#!/bin/bash
# A job of two nodes under Slurm, which saves a checkpoint when it is preempted or out of time, is put back into the
# queue, and goes on from there.
#
#   sbatch examples/cluster/slurm.sh runs/a --model cnn --data fashion-mnist --epochs 3 --save-every 100 --keep-last 2
#
# Arguments: folder of checkpoints, which all nodes see; options of shoal train. Every task of srun is a rank: shoal takes
# rank, size, address and port from Slurm.
#SBATCH --job-name=shoal
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=01:00:00
#SBATCH --signal=B:USR1@60
#SBATCH --requeue
#SBATCH --open-mode=append
set -u
run=${1:?usage: sbatch slurm.sh RUN [OPTIONS OF shoal train]}
shift
# Proves the ranks to each other; see SECURITY.md.
SHOAL_SECRET=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export SHOAL_SECRET

trap 'told=1; scancel --signal=TERM "$SLURM_JOB_ID.0"' USR1  # the time is nearly over
trap told=1 TERM                                             # Slurm tells the ranks too; this shell waits for them
srun shoal train --save "$run" --resume latest "$@" &
ranks=$!
while true; do
  told=
  wait $ranks
  code=$?
  [ "$told" ] || break  # otherwise a signal may have ended the wait; the shell keeps the code of ranks that have ended
done
# 130: the ranks were told to stop, and have saved. The job goes back into the queue unless it was cancelled.
if [ $code -eq 130 ] && scontrol show job "$SLURM_JOB_ID" | grep -q JobState=RUNNING; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
