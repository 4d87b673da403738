#!/bin/bash
# SPDX-License-Identifier: MIT
# A program under DMTCP in a batch script of your own, without hpc_ckpt's chain.
#
#   #SBATCH --time=08:00:00
#   #SBATCH --array=1-10%1          # ten jobs, one after the other; or submit by hand again
#   #SBATCH --signal=B:USR1@300     # never USR2: that signal is DMTCP's own
#   module load dmtcp
#   bash dmtcp.sh ./my_program its arguments
#
# The first job starts the program, every later one goes on from the last checkpoint, and those
# after the end do nothing. CKPT_DIR (default ./dmtcp-<name of the job>) holds the checkpoints,
# INTERVAL (default 1800) is the seconds between them. The command may be an mpirun, on one node.
# In a chain (level: dmtcp with an mpirun) hpc_ckpt starts it: the checkpoints are then in the run
# directory, and the notice file ends it. DMTCP_BIN names the directory of DMTCP's programs.
# Exit code: 0 the work is complete, 75 saved and to be run again, else the program's own.
set -u
[ $# -gt 0 ] || { echo "usage: dmtcp.sh COMMAND [ARGUMENT...]" >&2; exit 2; }
interval=${INTERVAL:-1800}
default=${HPC_CKPT_ROOT:+$HPC_CKPT_ROOT/dmtcp}
home=$(realpath -m "${CKPT_DIR:-${default:-dmtcp-${SLURM_JOB_NAME:-program}}}")
PATH=${DMTCP_BIN:+$DMTCP_BIN:}$PATH
say() { echo "dmtcp.sh: $*" >&2; }

mkdir -p "$home" || exit 1
[ -e "$home/DONE" ] && { say "complete already; remove $home to begin anew"; exit 0; }
exec 9>"$home/lock"
flock -n 9 || { say "another job runs in $home"; exit 75; }

# One coordinator for this job alone: a free port, a directory of its own.
own=$(mktemp -d)
leave() { [ -n "${port-}" ] && dmtcp_command -h 127.0.0.1 -p "$port" -q; kill "$coordinator"; rm -rf "$own"; }
dmtcp_coordinator --exit-on-last --port 0 --port-file "$own/port" --ckptdir "$own" \
    </dev/null >"$own/log" 2>&1 9>&- &
coordinator=$!
trap 'leave >/dev/null 2>&1' EXIT
for _ in {1..100}; do [ -s "$own/port" ] && break; sleep 0.1; done
port=$(cat "$own/port") || { say "no coordinator: $(tail -n 1 "$own/log")"; exit 1; }
joined=(-j -h 127.0.0.1 -p "$port" -q)

unset DMTCP_COORD_PORT DMTCP_CHECKPOINT_DIR DMTCP_FORKED_CHECKPOINT
export HWLOC_COMPONENTS=${HWLOC_COMPONENTS--linuxio}
# Open MPI's files of a session must be there again: under /tmp they go with the job, or the node.
export OMPI_MCA_orte_tmpdir_base=${OMPI_MCA_orte_tmpdir_base-$home/ompi}
mkdir -p "$OMPI_MCA_orte_tmpdir_base"

# Images are written to $home/images and nowhere else: they name that path. A whole set of them
# is moved into $home/1 or $home/2, sealed by a list of digests, and only then pointed at. Never
# into the one that the program went on from: until the seal there may be no other that is whole.
images=$home/images
whole() { [ -s "$1/SHA256" ] && (cd "$1" && sha256sum --quiet -c SHA256 >&2); }
saved=
for name in $(cat "$home/newest" 2>/dev/null) $(cat "$home/older" 2>/dev/null); do
    if whole "$home/$name"; then saved=$name; break; fi
    say "$home/$name is damaged"
done
if [ -s "$home/newest" ] && [ -z "$saved" ]; then say "no whole checkpoint is left"; exit 1; fi
rm -rf "$images" && mkdir "$images" || exit 1
if [ -n "$saved" ]; then
    say "goes on from $home/$saved"
    ln -s "$home/$saved"/*.dmtcp "$images" || exit 1
    for files in "$home/$saved"/*_files; do
        if [ -d "$files" ]; then cp -a "$files" "$images" || exit 1; fi
    done
    cd "$(cat "$home/cwd")" || exit 1
    # At random addresses a restarted program may crash when it asks for more memory.
    still=(setarch "$(uname -m)" -R)
    "${still[@]}" true 2>/dev/null || still=()
    ${still[@]+"${still[@]}"} dmtcp_restart "${joined[@]}" "$images"/*.dmtcp 9>&- &
else
    pwd >"$home/cwd"
    dmtcp_launch "${joined[@]}" --no-gzip --ckptdir "$images" "$@" 9>&- &
fi
program=$!

written() {
    [ -z "$(find "$images" -maxdepth 1 -name '*.temp')" ] &&
        [ -n "$(find "$images" -maxdepth 1 -name '*.dmtcp')" ] &&
        dmtcp_command -h 127.0.0.1 -p "$port" -s | grep -q RUNNING=yes
}
point() { echo "$2" >"$home/$1.new" && mv "$home/$1.new" "$home/$1"; }
checkpoint() {
    local next=1 need free
    [ "$saved" = 1 ] && next=2
    # Without space DMTCP would kill the program.
    need=$(dmtcp_command -h 127.0.0.1 -p "$port" -l | sed -n 's/.*\[[0-9]*:\([0-9]*\)\]@.*/\1/p' |
        xargs -r ps -o rss= -p | awk '{n += $1 + 262144} END {print n + 0}')
    free=$(df --output=avail "$home" | tail -n 1)
    [ "$need" -gt 0 ] || { say "not saved: nothing runs under DMTCP"; return 1; }
    [ "$free" -gt "$need" ] || { say "not saved: $need KiB are needed, $free are free"; return 1; }
    find "$images" -maxdepth 1 -type l -delete
    dmtcp_command -h 127.0.0.1 -p "$port" -bc || return 1
    until written; do # release 4.1 answers before the images are there
        kill -0 "$program" 2>/dev/null || return 1
        sleep 0.2
    done
    rm -rf "${home:?}/$next" && mkdir "$home/$next" && mv "$images"/* "$home/$next" || return 1
    (cd "$home/$next" && find . -type f ! -name SHA256 -exec sha256sum {} + >SHA256) || return 1
    sync -f "$home" && point older "$saved" && point newest "$next" && sync -f "$home" || return 1
    saved=$next
    say "saved in $home/$next"
}

ending=
trap 'ending=yes' USR1 TERM
last=$SECONDS
while kill -0 "$program" 2>/dev/null && [ -z "$ending" ]; do
    sleep 1 &
    wait $!
    [ -z "${HPC_CKPT_NOTICE-}" ] || [ ! -e "$HPC_CKPT_NOTICE" ] || ending=yes
    if [ $((SECONDS - last)) -ge "$interval" ] && [ -z "$ending" ]; then
        checkpoint
        last=$SECONDS
    fi
done

if [ -n "$ending" ] && kill -0 "$program" 2>/dev/null; then
    checkpoint && code=75 || code=1
    # A program that is told to quit ends with 0, as if it were complete: its code is not asked.
    dmtcp_command -h 127.0.0.1 -p "$port" -q
    exit "$code"
fi
wait "$program"
code=$?
if [ "$code" = 0 ] && ! grep -q "last client exited" "$own/log"; then
    sleep 1
    grep -q "last client exited" "$own/log" || { say "code 0, but somebody has told it to quit"; exit 1; }
fi
# dmtcp_command -kc leaves no word, but an image that was not asked for here.
if [ "$code" = 0 ] && [ -n "$(find "$images" -maxdepth 1 -type f -name '*.dmtcp' -newermt '-10 seconds')" ]; then
    say "code 0, but just before somebody else has made a checkpoint, as -kc does"
    exit 1
fi
[ "$code" = 0 ] && touch "$home/DONE"
[ "$code" = 99 ] && say "99 is a failed assertion of DMTCP: see above"
exit "$code"
