"""The slow path: answers every call that the fast path has no compiled call for.

`dispatch` is the entry: handler, plan, or fallback, as `registry` says. `plan_cache` finds or makes
the plan and `execute` runs it; `fallback` replicates the operands where no rule holds, and logs it.
`one_mesh` brings operands on
several spellings of one mesh to one of them.
`overlapping_writes` refuses writes to elements that share memory. `mutate` and `out_argument` write
results into existing tensors, and `writes` finds which operands a call without a rule has written
to. `plain_operands` compares plain tensors over ranks at their first uses. `argument_names` brings
calls into one form, and `observers` is the interface of `explain` and `strict`.
"""
