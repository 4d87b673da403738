#!/bin/bash
# SPDX-License-Identifier: MIT
# The direct task of a link's one step: the only process that hears the scheduler's signals.
# It turns them into a line of the notice file, and never signals the command it runs.
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
    code+=$part
    if [ -z "$code" ] && ! kill -0 "$second" 2>/dev/null; then
        read -r code <&3
        [[ $code == *';' ]] || code='137;' # the second shell itself was killed
    fi
done
exit "${code%;}"
