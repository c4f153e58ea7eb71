"""Agreement between ranks, and resources that the ranks of one machine share.

Reading guide: a `Coordinator` gives every rank's message to every rank, and `all_or_none` runs
something on all ranks so that all of them get all results, or all raise: with these two, in
`coordinator`, ranks save and load together. `groups` is the coordinator of a torch process group.
Before the first message of a call the ranks meet in the store of their group: `meeting` waits for
all of them for a bounded time and names who is missing. `torch_groups` is the one module that uses
undocumented parts of torch. `hosts` tells which ranks run on one machine; `shared_memory` and
`pipe_barrier` are used by these to read together.
"""
