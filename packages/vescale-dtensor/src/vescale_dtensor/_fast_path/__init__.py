"""The fast path: a call that was seen before runs in about one microsecond of Python.

`lookup` is `__torch_function__`: it makes a key of the function and its operands' specs and finds a
compiled call in `cache`. Where there is none, `compile` takes the slow path once and compiles what
is left of the call: unwrap, call torch on the locals, wrap. `methods` does the look-up inside
methods of the class, before torch's C++ hands the call over; `foreach` is the same for lists.

Everything unusual goes to `_dispatch`, so nothing is decided here that is not decided there.
"""
