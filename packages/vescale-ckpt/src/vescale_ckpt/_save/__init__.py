"""Saving: propose, plan, write, commit.

What happens in `save(path, state)`, on every rank, in `save.py`:

1. **Propose** (`_propose`). `flatten` takes the state apart: a tree of JSON nodes, and tensors by
   name. `LocalTensors` (in `write`) finds the boxes of the global tensors that this rank holds and
   makes an offer of each: dtype, global shape, boxes, and for small plain tensors a digest of their
   bytes. Rank 0 also refuses a path that exists, and makes the directory to write in, a hidden
   one beside the target: `.step-1.saving-g-0123456789abcdef` (`open_location` in `commit`). The
   offers and trees are exchanged by `all_or_none`: from here on every rank knows every offer.
2. **Plan** (`plan_save` in `plan`). A pure function of the offers, so all ranks compute the same
   plan and nothing has to be sent: each distinct box is written once, by one of the ranks that hold
   it, so that all write about as many bytes. Boxes that overlap, leave holes, or whose copies
   differ are refused here, before a byte of data is written. `merge` makes one tree of all trees.
3. **Write** (`write_data` in `write`). Each rank writes its items into data files of its own,
   checksums each block as it goes, and syncs the files. The records for the manifest, names, byte
   ranges and checksums, are exchanged by `all_or_none`.
4. **Commit** (`commit` in `commit`). Rank 0 checks that all files have arrived in full, writes the
   manifest, then COMMIT with the digest of the manifest, and makes both durable. One rename lets it
   count: of the directory, or, where it replaces another checkpoint, of COMMIT. A last
   `all_or_none` tells all ranks how that went.

   An object store has no renames: there all is written where it stays, and the put of COMMIT lets
   it count.

A rank that fails in any step tells so instead of its answer. Then all ranks raise its error, and
rank 0 removes the directory, unless it may count already (`discard` in `commit`). A process that
dies leaves a hidden directory, or a generation that no COMMIT names; neither is ever read.

Reading guide for the rest: `async_save` does 1 and 2 in the foreground and 3 and 4 in a thread;
`staging_queue` carries copies of the items from one to the other, through `buffers`, host memory of
bounded size. `replan_cache` replaces 1 and 2 by one short message where a state has the same layout
as the one before.
"""
