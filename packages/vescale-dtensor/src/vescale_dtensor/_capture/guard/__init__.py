"""Finds what a program depends on before the function runs, and compares it at every call.

In comes a call; out goes whether a program stands for it, and if not, what differs, in words.

- `call_key` makes the key of a call, under which programs are filed: one tuple of its arguments,
  which `records` takes apart, and of `global_state`, torch's modes.
- `named_state` walks what the code of the function names. `code_names` reads the names off code,
  `code_files` says whose code counts, `kinds` what sort of thing an object is, `places` how code
  reaches it. `free_tensors` has the tensors that the walk meets.
- What a program keeps of that: `state_guard` for Python state, `module_guards` for parts, hooks and
  flags of modules, `free_tensors` for layouts and gradients. `equality` says when one value may
  stand for another.
- `own_changes` compares after the recording what the walk has found before it: what the function
  itself writes is refused, if it does so in call after call.
"""
