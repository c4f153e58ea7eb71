"""Differentiable use, redistribution and conversion of DTensors; gradients as users see them.

Autograd runs on local tensors and knows nothing of layouts. This room adds the typed rule: a
gradient has the layout of its tensor, but where the tensor is replicated, the op that used it
decides whether each rank has the complete gradient (an invariant use) or a partial one, which has
to be summed over ranks (a varying use).

Read in this order:

1. `cotangent`: the rule, as a function from layouts to layouts. Everything else builds on it.
2. `local_use`: the local tensor for a use. For leaves, `leaf_gradient` records on which axes
   `.grad` is partial; for activations, `uses` makes aliases that share one autograd node.
3. `redistribute`: from layout to layout, with `redistribution_setup` (what does not depend on data)
   and `redistribution_cache` (a second use in the same layout communicates nothing).
4. `conversion`: `from_local`, `to_local`, `distribute_tensor`.
5. What users see: `grad_property` (`.grad`), `backward`, `hooks`, `grad_fn`, `set_data`,
   `gradient_reducer` (all unreduced gradients at once), `user_gradients`.
6. `function_bridge`: custom autograd.Functions, whose nodes are attached to wrappers. Read it last,
   and then `function_results`: Functions that return plain tensors, which `function_forwards`
   finds where `Function.apply` is C.
"""
