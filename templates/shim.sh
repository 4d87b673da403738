#!/bin/bash
# SPDX-License-Identifier: MIT
# The direct task of a link's one step: the only process that hears the scheduler's signals.
# It turns them into a line of the notice file, and signals the command only where that was asked.
# There is no trap for CONT on purpose: bash would then lose a TERM that is pending with it.

notice() {
    if [ -n "${HPC_CKPT_NOTICE-}" ]; then
        printf '{"time": %(%s)T, "source": "shim %s", "hurry": false}\n' -1 "$1" \
            >>"$HPC_CKPT_NOTICE"
    fi
}
trap 'notice TERM' TERM
trap 'notice USR1' USR1
trap 'notice USR2' USR2

# HPC_CKPT_FORWARD="USR1 command" or "USR1 workers": a program that does not look at the notice
# file asked for a real signal. Once, when the notice is there, whoever wrote it. A steward sends it
# itself: it knows which processes are the program, and would end it before the next look here.
by_steward=
[[ " $* " == *" hpc_ckpt.levels.steward "* ]] && by_steward=yes
children() { cat /proc/"$1"/task/*/children 2>/dev/null || pgrep -P "$1"; }
name() { cat /proc/"$1"/comm 2>/dev/null; }
targets() { # processes below $1: of $2=workers those without children, else the first that is no shell
    local pid
    for pid in $(children "$1"); do
        if [ -z "$(children "$pid")" ]; then
            echo "$pid"
        elif [ "$2" = workers ] || [[ $(name "$pid") == @(bash|sh|dash) ]]; then
            targets "$pid" "$2"
        else
            echo "$pid"
        fi
    done
}
forwarded=
forward() {
    if [ -n "$forwarded$by_steward" ] || [ -z "${HPC_CKPT_FORWARD-}" ] ||
        [ ! -e "${HPC_CKPT_NOTICE-}" ]; then
        return
    fi
    forwarded=1
    local signal=${HPC_CKPT_FORWARD% *} pid
    for pid in $(targets "$second" "${HPC_CKPT_FORWARD#* }"); do
        # srun turns these into KILL for its tasks.
        [[ "$signal $(name "$pid")" == @(TERM|HUP|QUIT)" srun" ]] && continue
        kill -s "$signal" "$pid" 2>/dev/null
    done
}

# HPC_CKPT_FENCE: the lease of the next link, told where the command writes files of its own. If it
# is there, Slurm took this link for dead while it lived: two of them must not write. The next link
# waits for the file that says that nothing of this one is left. Of two shims, one inside an srun of
# the command, the outer one does it: they would stop each other.
outermost=
if [ -n "${HPC_CKPT_FENCE-}" ] && [ -z "${HPC_CKPT_FENCING-}" ]; then
    outermost=yes
    export HPC_CKPT_FENCING=1
fi
descendants() {
    local pid
    for pid in $(children "$1"); do
        echo "$pid"
        descendants "$pid"
    done
}
everyone() { # of the command on this node: below the second shell, or a task of an srun inside it
    local pid
    for pid in "$second" $(descendants "$second") \
        $(grep -lzxF "HPC_CKPT_FENCE=$HPC_CKPT_FENCE" /proc/[0-9]*/environ 2>/dev/null |
            grep -o '[0-9]*'); do
        if [ "$pid" != "$$" ] && [ "$(name "$pid")" != srun ]; then
            echo "$pid"
        fi
    done
}
lives() { [[ $(sed -n 's/^State:[[:space:]]*//p' /proc/"$1"/status 2>/dev/null) == [!ZX]* ]]; }
fence() {
    if [ -z "$outermost" ] || [ ! -e "$HPC_CKPT_FENCE" ]; then
        return
    fi
    echo "hpc-ckpt: the next link has begun: this one is killed" >&2
    local pid every
    kill -s STOP $(everyone) 2>/dev/null # from here on none of them starts another
    every=$(everyone)
    kill -s KILL $every 2>/dev/null
    for pid in $every; do
        while lives "$pid"; do sleep 0.1; done
    done
    local lease
    lease="${HPC_CKPT_FENCE%/*}/$(printf '%08d' "$HPC_CKPT_GENERATION")"
    rm -f "$lease.left"
    : >"$lease.released"
    exit 75
}

# A second shell runs the command in the foreground and hands its exit code over a pipe: bash
# forgets the code of a background command that ends while a trap interrupts `wait` (5.2: -1).
# Its traps are empty but set, so that it survives where every process of a step is signalled,
# and the command still starts with the default actions.
exec 4>&1
exec 3< <(
    trap - INT QUIT
    trap : TERM USR1 USR2
    "$@" </dev/null >&4 4>&-
    echo "$?;"
)
second=$!

# `read` is no better witness than `wait`: a trap changes its result, and a timeout can cut the
# line in two. So only a whole line counts. It wakes every second because a signal that arrives
# while another one's trap runs is only seen after that.
code=
until [[ $code == *';' ]]; do
    part=
    read -r -t 1 part <&3
    fence
    forward
    code+=$part
    if [ -z "$code" ] && ! kill -0 "$second" 2>/dev/null; then
        read -r code <&3
        [[ $code == *';' ]] || code='137;' # the second shell itself was killed
    fi
done
exit "${code%;}"
