"""The random numbers of one device for torch's own `torch.distributed.tensor`, FSDP2 and DDP.

```python
from vescale_rng.torch_dtensor import consistent

with consistent(data=mesh["dp"]):
    ...  # an unchanged training loop
```
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["consistent"]


class _Absent(Enum):
    """Whether `data` was given: None is an answer, and not the absence of one."""

    NOTHING = "not said"


@contextmanager
def consistent(
    *,
    data: "DeviceMesh | ProcessGroup | Sequence[DeviceMesh | ProcessGroup] | _Absent | None" = (
        _Absent.NOTHING
    ),
    batch_dim: int | Callable[[tuple[int, ...]], int] = 0,
    rows: int | Sequence[int] | None = None,
    factories: Literal["rows", "whole"] | None = None,
) -> Iterator[None]:
    """Make the random ops of torch's parallel tools draw what one device draws, in this block.

    **DTensors.** Inside, these give every rank its part of the tensor that one device would have
    after the same `torch.manual_seed`, for `Shard`, `_StridedShard` and `Replicate` on any mesh,
    and leave the generator of every rank where it would be there:

    - in place: `uniform_`, `normal_`, `log_normal_`, `bernoulli_` (also of tensors), `random_`,
      `exponential_`, `geometric_`, `cauchy_`, and all of `torch.nn.init` that is made of them;
    - new tensors: `rand_like`, `randn_like`, `randint_like`, `bernoulli`, `normal`,
      `torch.distributed.tensor.rand` and `randn` (which stock DTensor has for CUDA only);
    - `F.dropout`, `native_dropout`, `F.alpha_dropout`, `F.gumbel_softmax`, `multinomial`;
    - `poisson`, `binomial` and `F.rrelu` in training, whose values decide how many numbers they
      use: the input is gathered for them.

    **Data parallelism** (FSDP2, DDP, HSDP). There each rank has some rows of the batch in plain
    tensors, or in DTensors on a mesh without the data axis; `data` says so, as the tensors do not.
    The ops above (except those of the last line) on such tensors then draw the rank's rows of what
    one device draws for the global batch, uneven numbers of rows and none included; so do the
    dropout of features, of recurrent layers, and of attention that is made of single ops. Each
    draw is a small collective over the data axes, in which the ranks exchange how many rows they
    have: all data ranks draw the same ops in the same order. Parameters, and tensors made like one,
    are replicated; a tensor that is neither a batch nor a parameter is drawn under a nested
    `consistent(data=None)`. A plain tensor that is a shard of an activation along another axis (the
    hidden units of one tp rank, as `ColwiseParallel` hands on by default) has no place that could
    be known: a draw of what `to_local` gave, or of what was computed of it, is refused. Keep it a
    DTensor. A shard that a library cut by itself looks like rows, and is not supported.

    What `torch.utils.checkpoint` recomputes is drawn as in the forward, also after the block. Every
    rank must start with the same seed: draws of a batch compare it; `check_in_step` does, too. The
    innermost open block applies to an op. The hooks on DTensor belong to the process, the modes
    that see plain tensors to the thread and to the backwards it starts.

    Args:
        data: the axes that shard the batch: a `DeviceMesh` of one dim or of several
            (`mesh["replicate", "shard"]`: the rows of the last are neighbours), a process group, or
            several of these from slow to fast. None: there are none, and plain tensors are
            replicated (also local shards: that is not checked). Not given: with several ranks,
            draws of plain tensors are refused.
        batch_dim: the dim of such tensors that is sharded, alone or merged with faster ones, or a
            function that returns it for a shape: `lambda shape: 1 if len(shape) == 3 else 0`.
        rows: how many rows each data rank has, as one number or one for each; sizes must be
            multiples of it. The first draw compares, and then nothing is asked (unless a rank has
            none): a size that is no multiple later is an error of its rank alone.
        factories: what a tensor is that is made of a shape alone (`torch.rand(3)`): "rows" of this
            rank's batch, or "whole", the same on every rank. None refuses it, but for single
            numbers (`torch.rand(())`) and draws from a generator that is given.

    Raises:
        RngError: the installed torch lacks the hooks that this needs; nothing is changed.
        LayoutError: an unsupported argument. Inside, on every data rank: a draw of a tensor for
            which one of them cannot know which part of which tensor it is.
        StateError: inside, on every data rank: their generators differ.
    """
    with _block(data, batch_dim, rows, factories):
        yield


def _block(data: Any, batch_dim: Any, rows: Any, factories: Any) -> AbstractContextManager[None]:
    """The block for what `data` says, see `consistent`."""
    # Only here: who does not use DTensor does not pay for its import.
    from vescale_rng._torch_dtensor import blocks

    if isinstance(data, _Absent):
        return blocks.unsaid()
    if data is None:
        return blocks.without_data()
    return blocks.with_data(data, batch_dim, rows, factories)
