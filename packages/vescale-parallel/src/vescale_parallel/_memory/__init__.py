"""Memory of a torch.fx graph, planned and executed: in which order, and where everything lies.

How a graph goes through the files:

- `traced`: the graph runs once on fake tensors; out comes a `program`: operations, the storages
  they make, and who waits for whom (arguments, writes in place, draws, collectives). `sent`: what
  backends of collectives take for themselves.
- `simulated`: what lives at each step of an order. Every plan is judged by it.
- `reach`: what is the same in every order: key points, and a lower bound of the peak.
- `orders`, `search`: orders by rules, and branch and bound over a few operations.
- `ordered`: the best of them; program order is always among them.
- `layout`: offsets of storages in one block of memory. `highs`: both questions, asked of scipy.
- `places`: which operators can be told where to write; `arena`: the plan executed.
- `picture`: the plan drawn, time x address.
- `planned`: what all this is to a user. `measured` counts what a run really takes; `caching` is
  what torch's own allocator would have reserved.
"""
