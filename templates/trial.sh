#!/bin/bash
# SPDX-License-Identifier: MIT
# The job of `hpc-ckpt doctor`. Built like a link: this batch process, and one step whose direct
# task is the shim. Each process writes down which signals it heard; nobody's program is run.
folder=$1 shim=$2 signal=$3 seconds=$4 python=$5

# First of all, as in a link: a warning can come before anything is ready for it.
batch() { echo "$*" >>"$folder/batch"; }
trap 'batch TERM' TERM
trap 'batch "$signal"' "$signal"

export SLURM_EXPORT_ENV=ALL
unset PYTHONPATH LD_PRELOAD
batch start "$HOSTNAME"

if [ -s "$folder/modules" ]; then
    if ! command -v module >/dev/null 2>&1; then
        for init in /etc/profile.d/{modules,lmod,z00_lmod}.sh; do
            if [ -r "$init" ]; then . "$init"; fi
        done
    fi
    while read -r name; do
        if (module load "$name") >/dev/null 2>&1 </dev/null; then
            batch "loaded $name"
        else
            batch "missing $name"
        fi
    done <"$folder/modules"
fi

# All of these files were made before the job: opening one then shows its newest content, also
# over NFS, while a file that is made later may stay invisible for a minute.
read -r -d '' program <<'END'
folder=$1 signal=$2 seconds=$3
heard() { echo "$1" >>"$folder/program"; }
trap 'heard TERM' TERM
trap 'heard "$signal"' "$signal"
heard ready
while [ "$SECONDS" -lt "$seconds" ] && [[ -z $(<"$folder/leave") ]]; do
    sleep 0.3 &
    wait
done
END
export HPC_CKPT_NOTICE=$folder/notice
srun --ntasks=1 --kill-on-bad-exit=0 --output="${folder//%/%%}/step.log" \
    bash "$shim" bash -c "$program" program "$folder" "$signal" "$seconds" &
step=$!
"$python" -I -m hpc_ckpt.chain.probe "$folder" </dev/null &

# `wait` ends at every signal that is heard.
while kill -0 "$step" 2>/dev/null; do wait "$step"; done
batch end
