"""WHEN to checkpoint: pure arithmetic, no clock, no I/O."""
