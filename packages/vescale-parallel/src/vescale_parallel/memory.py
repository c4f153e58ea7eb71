"""Memory of a torch.fx graph, planned and executed; no mesh and no process group are needed.

    from torch.fx.experimental.proxy_tensor import make_fx
    from vescale_parallel import memory

    graph = make_fx(train_step, tracing_mode="fake")(parameters, states, batch)
    plan = memory.plan(graph, seconds=10)
    print(plan.peak, plan.program_peak, plan.gap)
    faster_to_free = plan.apply()                  # the graph with its nodes in another order
    results = plan.run(parameters, states, batch)  # and with its results at planned offsets

The order is a topological one whose peak is never above that of the graph's own; results are
bitwise the same. As ROAM does (arXiv 2310.19295), segments between operators that every order has
at the same step are ordered by themselves, updates run as soon as their gradients are there, and
all offsets are planned ahead. `measured` counts what a call really takes,
`workspaces` what kernels take for themselves.
"""

from vescale_parallel._errors import MemoryPlanError
from vescale_parallel._memory.allocator_bytes import Measured, measured, workspaces
from vescale_parallel._memory.memory_plan import ALIGNMENT, SOLVERS, MemoryPlan, plan

__all__ = [
    "ALIGNMENT",
    "SOLVERS",
    "Measured",
    "MemoryPlan",
    "MemoryPlanError",
    "measured",
    "plan",
    "workspaces",
]
