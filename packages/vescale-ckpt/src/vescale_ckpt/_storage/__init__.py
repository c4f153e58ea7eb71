"""The few file operations that a checkpoint is made of.

Reading guide: `base` is the protocol `Storage`, through which everything that touches a disk goes,
and helpers made of its operations; `local` and `fsspec_storage` implement it; `resolve` finds the
one that a path belongs to; `commit_lookup` tells what COMMIT says. `writeback` lets the disk begin
before a file is complete.
"""
