"""WHAT makes a process resumable: levels for programs that cannot be changed."""
# SPDX-License-Identifier: MIT
