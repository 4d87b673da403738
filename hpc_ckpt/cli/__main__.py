"""`python -m hpc_ckpt.cli`: the same command where the console script is not on the PATH."""

# SPDX-License-Identifier: MIT
from . import main

main()
