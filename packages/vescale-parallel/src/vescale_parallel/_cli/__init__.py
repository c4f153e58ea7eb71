"""The command line: plans, checked and priced for a mesh before anything is started.

- `arguments`: what can be asked, and what `--help` teaches.
- `models`: from what a user names to a model without values, and to its plan.
- `step_costs`: what a step would cost, with and without recomputation.
- `memory`: the memory of a graph.
- `schedule`: pipeline schedules compared.
- `files`: what they write.
- `plan_output`: the answer as tables, or as JSON.
"""
