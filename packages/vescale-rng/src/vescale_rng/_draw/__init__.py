"""The public functions that draw, for a shard of a tensor; each chooses the policy and the device.

Reading guide:
    fill: `fill_`, on which all others stand. Start here.
    devices: which tensors and generators are served where.
    factories: new tensors (`rand`, `randn_like`, ...).
    dropout, dropout_family: dropout, and the dropouts of features and of alpha.
    probabilities: draws whose parameters are tensors (`bernoulli_`, `normal`).
    sampling: permutations, and samples of categories.
    truncated_normal: `trunc_normal_`.
    data_dependent: ops whose values decide how many numbers they use; replicated tensors only.
    native_ops: random operators of torch, and their refusal under another policy.

The functions of `torch.nn.init` are in the public module `vescale_rng.init`.
"""
