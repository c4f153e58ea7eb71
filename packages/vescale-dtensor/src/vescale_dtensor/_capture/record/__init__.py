"""One run of a function, noted as a graph of local calls.

In comes the function with what `guard` found; out goes a graph, and how to return its results.

- `recorder` is the torch function mode under which the function runs. `graph` is the graph as it
  grows: which node made which tensor, and which come from outside. `step_arguments` has what steps
  are given besides tensors, `module_names` in which module they run.
- `surroundings` follows modes, hooks and generators from step to step. `wrapper_snapshot` takes off
  again what the run leaves on wrappers from outside.
- `unsupported` is what cannot be recorded, `constants` which tensors Python may read all the same.
  `refusals` is what becomes of such a call, on this rank and on others.
- `regions` marks what backward computes again, and folds it into one step.
- `outputs` plans what a replay returns; `passes` removes what no output and no effect needs;
  `generated_code` fixes what functions the code of the graph calls.
"""
