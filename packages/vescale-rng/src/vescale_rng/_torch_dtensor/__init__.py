"""torch's own DTensor, FSDP2 and DDP, made to draw what one device draws: inside `consistent`.

Reading guide:
    blocks: one `with consistent(...)`: which rule, modes and hooks it needs. Start here.
    rules: what is done with a random op: draw rows of the batch, refuse, or let it pass.
    batch_rows: where a tensor's rows are in the global batch, agreed on by the data ranks.
    known_draws: what was found out about a dropout, looked up where nobody has to be asked.
    row_messages: what the data ranks tell each other of a draw.
    data_axes: the ranks among which the batch is divided, and their messages.
    modes: every random op of the block's thread and its backwards, sent to the rule.
    empty_rows: what functions draw that return early where a rank has no rows.
    local_shards: plain tensors that are shards of more than a batch.
    parameters: which plain tensors are parameters, or made like one.
    ops: what each random op of ATen does on a part of a tensor.
    hooks: replaces torch's functions by ours, and restores them.
    probes: what of torch is replaced, and whether the installed torch calls it. These two alone
        use names that are private to torch.
    current_rule: which rule is in force in this thread.
"""
