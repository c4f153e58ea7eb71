"""The communication of a step's graph, scheduled: buckets, early starts, late waits, a timeline.

    from vescale_dtensor import capture, joint
    from vescale_parallel import graph, memory

    step = capture(lambda words: model(words))       # forward and loss
    whole = joint(step, words)                       # with backward and sums of gradients
    planned = graph.schedule(whole.graph_module)     # alike on all ranks
    print(planned)
    whole = whole.running(planned.graph_module)
    loss = whole(words)                              # the same bits; p.grad is set

With ZeRO, and with the optimizer in the graph:

    step = graph.train_step(model, loss_of_batch, words).with_optimizer(optimizer, max_norm=1.0)
    loss, norm = step(words)                         # gathers, clipping and update are nodes

A `torch.fx` graph with torch's functional collectives is all that it needs. `timeline` runs the
graph on paper, computation beside communication.
"""

from vescale_parallel._cost import Link
from vescale_parallel._errors import DisagreementError, GraphError
from vescale_parallel._graph.agreement import Agreed, Entry
from vescale_parallel._graph.compiled_regions import Compiled, Region, compile_regions
from vescale_parallel._graph.joint_step import train_step
from vescale_parallel._graph.machine import Machine, calibrate, measured_seconds
from vescale_parallel._graph.offload import Offloaded, offload
from vescale_parallel._graph.recomputation import Recomputed, recompute
from vescale_parallel._graph.scheduling import Schedule, schedule
from vescale_parallel._graph.timeline import Span, Timeline, timeline

__all__ = [
    "Agreed",
    "Compiled",
    "DisagreementError",
    "Entry",
    "GraphError",
    "Link",
    "Machine",
    "Offloaded",
    "Recomputed",
    "Region",
    "Schedule",
    "Span",
    "Timeline",
    "calibrate",
    "compile_regions",
    "measured_seconds",
    "offload",
    "recompute",
    "schedule",
    "timeline",
    "train_step",
]
