"""Copies of graphs, for passes that leave the graph that they were given as it is."""

import copy
import warnings

from torch import fx


def copied_module(module: fx.GraphModule) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """Return a copy whose nodes may be changed, and the copy of each node.

    It is called as the given one, also where inputs are nested; parameters and constants are
    shared. Whoever changes nodes calls `recompile()`.
    """
    with warnings.catch_warnings():  # torch's own copy of how inputs are nested is deprecated
        warnings.simplefilter("ignore", FutureWarning)
        graph = copy.deepcopy(module.graph)
    # By place: a copy has its nodes in the same order.
    copies = dict(zip(module.graph.nodes, graph.nodes, strict=True))
    made = fx.GraphModule(module, graph)
    made.meta.update(module.meta)
    made.train(module.training)
    return made, copies
