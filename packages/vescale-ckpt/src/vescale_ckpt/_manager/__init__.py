"""A directory of checkpoints by training step."""
