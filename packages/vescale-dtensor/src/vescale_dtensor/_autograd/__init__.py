"""Differentiable use, redistribution and conversion of DTensors; gradients as users see them.

Autograd runs on local tensors and knows nothing of layouts. What this room adds is the typed rule:
a gradient lies as its tensor does, but where the tensor is replicated, the op that used it decides
whether each rank has the complete gradient (an invariant use) or one term of a sum (a varying use).

Read in this order:

1. `cotangent`: the rule, as a function from layouts to layouts (22 lines that the rest stands on).
2. `local_use`: the local tensor for a use. For leaves `leaf_gradient` notes on which axes `.grad`
   is still a term; for activations `uses` makes aliases that share one autograd node.
3. `redistribute`: layout to layout, with `prepared` (what does not depend on data) and
   `redistribution_cache` (a second use in the same layout communicates nothing).
4. `conversion`: `from_local`, `to_local`, `distribute_tensor`.
5. What users see: `grad_property` (`.grad`), `backward`, `hooks`, `grad_fn`, `set_data`,
   `gradient_reducer` (all unfinished gradients at once), `user_gradients`.
6. `function_bridge`: custom autograd.Functions, whose nodes hang on wrappers. Read it last.
"""
