"""Turns a collective, as a plan, into calls of torch.distributed.

A collective is a generator (`Steps`) that yields `primitives`, the few movements there are, and
resumes with the tensors that arrived. `runner` drives it: it is the only place where a call reaches
torch. Read in this order:

1. `primitives`: each movement: its call of torch, and what it does to all members at once
   (`reference_semantics`), which the emulator and the simulation use.
2. `flat_ops` and `sharded_dim`: collectives of flat buffers, and of tensors sharded along a dim.
3. `runner`, `hooks` (tracing, checks and faults wrap a primitive), `failures` (what an error says).
4. `autograd`: a collective is a linear map whose gradient is its adjoint; `handles`: handles.
5. `fast_path`: a call like one that was checked before goes straight to torch. Either way it is
   `log_events` in the execution log of its group.
6. `functional` and `operators`: the same collectives under `torch.compile`.
"""
