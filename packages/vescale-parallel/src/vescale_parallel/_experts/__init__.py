"""Experts over ranks: tokens go to the experts that they chose, and what these say comes back.

Top to bottom (imports point down):

- `install`: lets modules of experts compute over a mesh, whoever wrote them.
- `forward`: one such module: placements of what enters it, and what it is to the ranks.
- `exchange`: local tensors only: which rows go where, what comes back, and its sum by token.
- `empty_experts`: a module that got no rows still has gradients. `rows`: rows taken in an order.
- `moe`: a small layer of experts of our own; `router`: its router; `losses`: of any router.
- `resolve`: rules and a model -> rows, or what is wrong. `kinds`: what a module of experts is.
- `rules`: text -> rules. `partition`: loads -> which experts each rank holds. Pure.
"""
