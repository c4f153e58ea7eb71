"""Memory of a torch.fx graph, planned and executed: in which order, and where everything lies.

How a graph goes through the files:

- `tracing`: the graph runs once on fake tensors; out comes a `program`: operations, the storages
  they make, and who waits for whom (arguments, writes in place, draws, collectives).
  `backend_bytes`: what backends of collectives take for themselves.
- `simulation`: what lives at each step of an order. Every plan is judged by it.
- `reach`: what is the same in every order: key points, and a lower bound of the peak.
- `orders`, `search`: orders by rules, and branch and bound over a few operations.
- `order_choice`: the best of them; program order is always among them.
- `layout`: offsets of storages in one block of memory. `highs`: both questions, asked of scipy.
- `places`: which operators can be told where to write; `arena`: the plan executed.
- `picture`: the plan drawn, time x address.
- `memory_plan`: what all this is to a user. `allocator_bytes` counts what a run really takes;
  `caching` is what torch's own allocator would have reserved.
"""
