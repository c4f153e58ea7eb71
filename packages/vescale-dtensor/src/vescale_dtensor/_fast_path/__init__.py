"""The fast path: a call that was seen before runs in about one microsecond of Python.

`lookup` is `__torch_function__`: it makes a key of the function and its operands' specs (`keys`),
and finds a compiled call in `cache` (`tables`: in which table, by what autograd makes of the
operands). On a miss, `compile` takes the slow path once and compiles what is left of the call:
unwrap, call torch on the local tensors, wrap (`forms`: the template of such calls;
`compile_general`: those that it has no form for; `sampled_values`: plain operands are looked at now
and then). `methods` does the lookup inside methods of the class, before torch's C++ hands the call
over; `foreach` does it for functions of lists.

A compiled call only repeats what `_dispatch` has decided for a call with the same key, and
everything unusual goes there every time.
"""
