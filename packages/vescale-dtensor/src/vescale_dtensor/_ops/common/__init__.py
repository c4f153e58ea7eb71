"""Holds helpers of several families, which import nearly nothing of each other.

- `functions`: tables of rules (`entries`, `both_forms`) and arguments by name.
- `letters`, `memory_formats`: what a rule says of dims and of their order in memory.
- `unsharded_dims`, `reshard_offer`: operations that need some dims unsharded.
- `sharded_dim`: operations that reduce or scan a dim, sharded or not, by a kernel of their own.
- `local_index`: look-ups and writes by index into a sharded dim.
- `channel_groups`: shards between groups of channels.
- `empty_shards`: functions that torch refuses to run on empty shards.
"""
