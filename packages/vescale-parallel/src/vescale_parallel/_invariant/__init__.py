"""Steps with the same bits on any number of data-parallel ranks: `deterministic="dp-invariant"`.

The batch is cut into logical shards, and each is computed by itself, as a microbatch is: kernels
see the same shapes whatever the number of ranks, and seeds follow the shard and not the rank. Sums
over the shards are one fixed binary tree. A rank adds up the subtrees that it has whole; what is
left is exchanged and added in the tree's order on the rank that needs it. No library's reduction
takes part, as its order follows the number of ranks.

Top to bottom (imports point down):

- `step`: what `forward_backward` calls: shards one after another, then one exchange.
- `sums`: `sum_over_shards`, metrics; `metrics`: what such a function returned, packed.
- `norms`: running statistics of batch norms; `shard_rows`: numbers of all shards, told to all.
- `delivery`: sums become `.grad` of the parameters; `shard_gradients`: gradients of one shard.
- `meshes`: on which mesh one shard is computed.
- `exchange`: subtree sums between ranks; `bundle`: gradients packed flat.
- `facts`: what ranks tell each other before: losses, which gradients there are, problems.
- `resolve`: what a plan says of it, what is refused, and what it costs.
- `tree`: the order of the sums. Pure.
"""
