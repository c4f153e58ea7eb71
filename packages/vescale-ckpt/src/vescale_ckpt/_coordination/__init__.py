"""How ranks agree, and what the ranks of one machine share.

Reading guide: a `Coordinator` gives every rank's message to every rank, and `all_or_none` runs
something on all ranks so that all of them get all results, or all raise: with these two, in
`coordinator`, ranks save and load together. `hosts` tells which ranks run on one machine;
`shared_memory` and `pipe_barrier` are what those read together with.
"""
