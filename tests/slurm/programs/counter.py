"""Counts; keeps its place in a file; no hpc_ckpt inside. With --on SIGNAL it saves on that signal,
else it looks for the notice file. With --ignore SIGNAL it does so.

    counter.py STATE TOTAL SECONDS_A_STEP [--on USR1] [--ignore TERM]
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("state", type=Path)
    parser.add_argument("total", type=int)
    parser.add_argument("step_s", type=float)
    parser.add_argument("--on")
    parser.add_argument("--ignore")
    options = parser.parse_args()
    if options.ignore:
        signal.signal(getattr(signal, f"SIG{options.ignore}"), signal.SIG_IGN)
    told: list[int] = []
    if options.on:
        number = getattr(signal, f"SIG{options.on}")
        signal.signal(number, lambda received, frame: told.append(received))
    count = int(options.state.read_text()) if options.state.exists() else 0
    print(f"from {count}", flush=True)
    notice = Path(os.environ["HPC_CKPT_NOTICE"])
    while count < options.total:
        time.sleep(options.step_s)
        count += 1
        if told or (not options.on and notice.exists()):
            print(f"told by {'signal' if told else 'notice'} at {count}", flush=True)
            options.state.write_text(str(count))
            return 75
    options.state.write_text(str(count))
    return 0


if __name__ == "__main__":
    sys.exit(main())
