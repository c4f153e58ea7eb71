"""The random numbers of one device for torch's own `torch.distributed.tensor`.

```python
from vescale_rng.torch_dtensor import consistent

with consistent():
    ...  # an unchanged script
```
"""

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["consistent"]


@contextmanager
def consistent() -> Iterator[None]:
    """Make the random ops of torch's `DTensor` draw what one device draws, until the block ends.

    Inside, these give every rank its part of the tensor that one device would have after the same
    `torch.manual_seed`, for `Shard`, `_StridedShard` and `Replicate` on any mesh, and leave the
    generator of every rank where it would be there:

    - in place: `uniform_`, `normal_`, `log_normal_`, `bernoulli_` (also of tensors), `random_`,
      `exponential_`, `geometric_`, `cauchy_`, and all of `torch.nn.init` that is made of them;
    - new tensors: `rand_like`, `randn_like`, `randint_like`, `bernoulli`, `normal`,
      `torch.distributed.tensor.rand` and `randn` (which stock DTensor has for CUDA only);
    - `F.dropout`, `native_dropout`, `F.alpha_dropout`, `F.gumbel_softmax`, `multinomial`;
    - `poisson`, `binomial` and the training form of `F.rrelu`, whose values decide how many
      numbers they take: the input is gathered for them.

    Every rank must start with the same seed: `vescale_rng.check_in_step` tells. The policy is the
    one in force when an op runs. Not changed: the dropout inside of `scaled_dot_product_attention`,
    and ops that stock DTensor refuses, such as the dropout of features.

    The hooks belong to the process, not to a thread, so that recomputation in a backward thread
    draws the same. Blocks may be nested.

    Raises:
        RngError: the installed torch lacks the hooks that this needs; nothing is changed.
    """
    # Only here: who does not use DTensor does not pay for its import.
    from vescale_rng._torch_dtensor.hooks import installed

    with installed():
        yield
