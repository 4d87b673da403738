"""Side by side with peers and with the machine's limits. Not tests: nothing asserts on time."""

# SPDX-License-Identifier: MIT
