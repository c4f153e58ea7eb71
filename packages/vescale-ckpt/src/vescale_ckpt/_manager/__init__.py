"""A directory of checkpoints by training step.

Reading guide: `manager` is `CheckpointManager`; `retention` decides which steps are kept, as a pure
function of what is there.
"""
