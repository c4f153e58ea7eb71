"""The slow path: what happens to a call that was not seen before.

`dispatch` is the entry: handler, plan, or fallback, as `registry` says. `plan_cache` finds or makes
the plan, `execute` runs it; `fallback` replicates the operands where no rule holds, and says so.
`mutate` and `out_argument` write results into tensors that exist; `plain_operands` compares plain
tensors over ranks at their first uses; `observers` is what `explain` and `strict` are told.
"""
