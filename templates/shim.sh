#!/bin/bash
# SPDX-License-Identifier: MIT
# The direct task of a link's one step: the only process that hears the scheduler's signals.
# It turns them into a line of the notice file, and never signals the command it runs.
# There is no trap for CONT on purpose: bash would then lose a TERM that is pending with it.

notice() {
    interrupted=yes
    if [ -n "${HPC_CKPT_NOTICE-}" ]; then
        printf '{"time": %(%s)T, "source": "shim %s", "hurry": false}\n' -1 "$1" \
            >>"$HPC_CKPT_NOTICE"
    fi
}
for name in TERM USR1 USR2; do
    # shellcheck disable=SC2064 # the name is meant to be fixed now
    trap "notice $name" "$name"
done

# A background command would inherit ignored INT and QUIT; the command gets the defaults.
(trap - INT QUIT TERM USR1 USR2; exec "$@") </dev/null &
child=$!

# A trapped signal cuts `wait` short with 128+n, which is not the command's code: wait again.
# bash remembers the code of a child that ended meanwhile.
interrupted=yes
while [ -n "$interrupted" ]; do
    interrupted=
    wait "$child"
    code=$?
done
exit "$code"
