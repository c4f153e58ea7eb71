"""A directory of checkpoints by training step.

Reading guide: `manager` is `CheckpointManager`; `provenance` reads how old and how healthy each one
says it is; `retention` decides which steps are kept, as a pure function of what is there.
"""
