"""WHAT a checkpoint is on disk: docs/format.md, byte for byte."""
