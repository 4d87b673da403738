"""WHERE checkpoints live: tiers move bytes and know no tensors."""
