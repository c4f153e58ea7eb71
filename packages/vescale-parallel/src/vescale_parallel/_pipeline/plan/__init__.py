"""Divides a model into stages and chooses their schedule, before a forward runs.

In: the words of a plan, and a model. Out: `Split`, the blocks and parameters of each stage, a
`Schedule`, and `Walked`, the modules and parameters that a step finds.

- `rules`: parses what a plan says of its pipeline.
- `schedule_choice`: reads the schedule that it asks for, or chooses the fastest.
- `order`: finds in which order the model uses its blocks and what lies around them.
- `split`: assigns blocks and parameters to stages.
- `model_walk`: lists the model's modules and parameters, once in a step.
"""
