"""WHOSE state: the tracked objects (registry.py), their state as JSON and leaves (tree.py)."""

# SPDX-License-Identifier: MIT
