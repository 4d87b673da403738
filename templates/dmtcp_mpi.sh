#!/bin/bash
# SPDX-License-Identifier: MIT
# An MPI program on several nodes under DMTCP in a batch script of your own: ranks under DMTCP,
# mpirun outside, as a course had it with DMTCP 2.6 and Open MPI 3.1. NOT RUN on several nodes by
# this project. Tried on one with DMTCP 5.0 and Open MPI 4.1.4 it saves, but after the restart
# the ranks end with code 195, since their connection to mpirun is dead. On one node take
# dmtcp.sh, which has mpirun under DMTCP too and goes on. Elsewhere try a small case first.
#
#   #SBATCH --nodes=2 --ntasks=40 --time=08:00:00
#   #SBATCH --array=1-10%1
#   #SBATCH --signal=B:USR1@300
#   module load openmpi dmtcp
#   bash dmtcp_mpi.sh ./my_mpi_program its arguments
#
# The coordinator runs on the first node, and every rank joins it there. Exit codes: dmtcp.sh.
# There is ONE set of images, without digests: DMTCP's restart script names their paths, so that
# each checkpoint is written over the one before. Killed meanwhile, or without space, neither may
# be whole: keep a copy of $CKPT_DIR between two jobs.
set -u
[ $# -gt 0 ] || { echo "usage: dmtcp_mpi.sh COMMAND [ARGUMENT...]" >&2; exit 2; }
interval=${INTERVAL:-1800}
home=$(realpath -m "${CKPT_DIR:-dmtcp-${SLURM_JOB_NAME:-program}}") # seen by all nodes
say() { echo "dmtcp_mpi.sh: $*" >&2; }
mkdir -p "$home/images" || exit 1
[ -e "$home/DONE" ] && { say "complete already"; exit 0; }

own=$(mktemp -d)
dmtcp_coordinator --exit-on-last --port 0 --port-file "$own/port" --ckptdir "$home" \
    </dev/null >"$own/log" 2>&1 &
coordinator=$!
trap 'kill "$coordinator" 2>/dev/null; rm -rf "$own"' EXIT
for _ in {1..100}; do [ -s "$own/port" ] && break; sleep 0.1; done
DMTCP_COORD_PORT=$(cat "$own/port") || { say "no coordinator"; exit 1; }
DMTCP_COORD_HOST=$(hostname)
export DMTCP_COORD_HOST DMTCP_COORD_PORT HWLOC_COMPONENTS=${HWLOC_COMPONENTS--linuxio}

# Versions before 3.1 know the resource manager by an option that later ones have not.
manager=()
dmtcp_launch --help 2>&1 | grep -q -- '--rm' && manager=(--rm)

if [ -e "$home/SAVED" ]; then
    # DMTCP's own script: it knows which image belongs to which node.
    cd "$(cat "$home/cwd")" || exit 1
    "$home/dmtcp_restart_script.sh" -h "$DMTCP_COORD_HOST" -p "$DMTCP_COORD_PORT" &
else
    pwd >"$home/cwd"
    mpirun -np "${SLURM_NTASKS:-2}" dmtcp_launch -j --no-gzip --ckptdir "$home/images" \
        "${manager[@]}" "$@" &
fi
program=$!

checkpoint() { dmtcp_command -bc && sync -f "$home" && touch "$home/SAVED"; }
ending=
trap 'ending=yes' USR1 TERM
last=$SECONDS
while kill -0 "$program" 2>/dev/null && [ -z "$ending" ]; do
    sleep 1 &
    wait $!
    if [ $((SECONDS - last)) -ge "$interval" ] && [ -z "$ending" ]; then
        checkpoint
        last=$SECONDS
    fi
done
if [ -n "$ending" ]; then
    checkpoint && code=75 || code=1
    dmtcp_command -q
    exit "$code"
fi
wait "$program"
code=$?
[ "$code" = 0 ] && touch "$home/DONE"
exit "$code"
