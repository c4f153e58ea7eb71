"""ZeRO (FSDP): parameters, gradients and optimizer states as shards over one mesh axis.

- `rules`: the words of a plan; `resolve`: what they mean for a model, in rows and bytes. Pure.
- `flat_plan`: where the parameters of a unit are in its flat buffer, and who owns what. Pure.
- `reduce_ahead`: of how many units gradients are on their way at a time. Pure.
- `units`: which modules are gathered as one, from names alone. Pure.
- `offload`: what a plan says of the host's memory, and what that means. Pure.
- `precision`: the dtypes that a plan says; `dtypes`: those of each parameter. Pure.
- `stored_shard`: this rank's elements of a flat buffer, which stored parameters are views of.
- `flat_buffer`: one flat buffer in memory: this rank's shard, all gathered values, the gradients.
- `no_history`: computing without a history.
- `gradient_packing`: gradients as what is concatenated to send them. Pure.
- `host`: shards that lie on the host, and the one way between it and the device.
- `gather`: the two nodes of autograd; `unit`: the buffers of a module, and whether its modules
  hold stored or gathered parameters at the moment.
- `addresses`: whose view a tensor is, by its address.
- `parameter_writes`: what modules write to gathered parameters, taken back to what is stored.
- `saved_tensors`: what autograd saves of gathered parameters is a note where to find it again.
- `end_of_backward`: told of a backward's end, also when it raised.
- `gather_log`: gathers and reductions, as events of what ranks compare.
- `owners`: which rank owns a tensor in full; `owner_steps`: how Muon steps those.
- `flat_steps`: optimizers that go by element step flat buffers.
- `steps`: what happens to buffers around an optimizer's step.
- `schedule`: when all that happens; the only place with module hooks.
- `recomputation`: the same for modules that backward computes again before it comes to their
  outputs.

`_apply.zero_install` makes a model's stored parameters, units and schedule of these.
"""
