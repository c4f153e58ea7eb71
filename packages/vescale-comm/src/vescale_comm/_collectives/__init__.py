"""The public collectives, one file for each.

Every file has the same three parts: a linear map (the plan, which autograd can transpose), the
public function, and `plan_...`, which checks arguments and returns the plan; `Emulator` calls the
plans too. Start with `broadcast`, the shortest, then `all_reduce` and `all_gather`.

Of several tensors: `bucket` (the layout of many tensors in few buffers, no communication) and
`bucketed_calls`. Variants: `in_place` (into memory of the caller), `compressed_reductions`
(`wire=`), `hierarchical` (two axes of different speed), `replicated_shards` (gradients of HSDP, for
`fsdp2`).
"""
