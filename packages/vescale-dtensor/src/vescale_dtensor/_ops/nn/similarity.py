"""Operations that compare or combine along one unsharded dim: distances, `glu`, `normalize`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vescale_dtensor._layout.local_shards import local_shape
from vescale_dtensor._ops.common.empty_shards import pads_empty
from vescale_dtensor._ops.common.functions import entries
from vescale_dtensor._ops.common.letters import broadcast_letters, drop_letter, letters
from vescale_dtensor._ops.common.sharded_dim import unless_refused
from vescale_dtensor._planning import Dims, LocalContext, OpCall, Reads, Rule, Signature, Strategy
from vescale_dtensor._planning.op_call import wrap_dim


def _with_unsharded_dim(position: int, default: int) -> Callable[[OpCall], Strategy | None]:
    """One operand, of which the dim at this position of the arguments is not sharded."""

    def strategy(call: OpCall) -> Strategy | None:
        dim, ndim = call.dim(position, default), call.operands[0].ndim
        if dim is None or len(call.operands) != 1:
            return None
        # `glu` pairs indices half the dim apart, and `normalize` needs the norm of all of it.
        dims = letters(ndim, {dim})
        return Signature((dims,), (dims,)).strategy()

    return strategy


def _cosine(call: OpCall) -> Strategy | None:
    """`cosine_similarity(x1, x2, dim, eps)`: broadcast, without the dim."""
    inputs, output = broadcast_letters(call.shapes())
    dim = wrap_dim(call.argument(2, "dim", 1), len(output))
    if len(inputs) != 2 or dim is None:
        return None
    # Not sharded along the dim: a cosine needs all of both vectors on one rank.
    kept = tuple(drop_letter(dims, dim) for dims in inputs)
    return Signature(kept, (tuple(d for d in output if d != dim),)).strategy()


def _pairwise(call: OpCall) -> Strategy | None:
    """`pairwise_distance(x1, x2, p, eps, keepdim)`: of the last dim."""
    inputs, output = broadcast_letters(call.shapes())
    if len(inputs) != 2 or not output:
        return None
    kept = tuple(tuple(None if d == output[-1] else d for d in dims) for dims in inputs)
    last: Dims = (None,) if call.argument(4, "keepdim", False) else ()
    return Signature(kept, ((*output[:-1], *last),)).strategy()


def _cdist(call: OpCall) -> Strategy | None:
    """Rows of either side may be sharded, and batches."""
    shapes = call.shapes()
    if len(shapes) != 2 or min(map(len, shapes)) < 2:
        return None
    (first, second), batch = broadcast_letters([shape[:-2] for shape in shapes])
    # Features are not sharded: a distance is a root of a sum over all of them, or a maximum.
    inputs: tuple[Dims, ...] = ((*first, "m", None), (*second, "n", None))
    return Signature(inputs, ((*batch, "m", "n"),)).strategy()


def _prelu(call: OpCall) -> Strategy | None:
    """`prelu(input, weight)`: one slope, or one for each channel."""
    shapes = call.shapes()
    if len(shapes) != 2 or len(shapes[1]) > 1:
        return None
    dims = letters(len(shapes[0]))
    # Global extent: a weight whose shard has one channel is still one slope per channel.
    many = len(shapes[1]) == 1 and shapes[1][0] != 1
    if many and (len(dims) < 2 or shapes[0][1] != shapes[1][0]):
        return None
    inputs: tuple[Dims, ...] = (dims, (1,) if many else (None,) * len(shapes[1]))
    return pads_empty(Signature(inputs, (dims,))).strategy()


def _one_hot(call: OpCall) -> Strategy | None:
    """`one_hot(tensor, num_classes)`; without the number of classes, it depends on values."""
    count = call.argument(1, "num_classes", -1)
    # Without a count, each rank would take the largest of its own labels.
    if len(call.operands) != 1 or not isinstance(count, int) or count < 1:
        return None
    dims = letters(call.operands[0].ndim)
    return Signature((dims,), ((*dims, None),), output_orders=(None,)).strategy()


def _grouped_product(call: OpCall) -> Strategy | None:
    """`_grouped_mm(a, b, offs=…)`: rows of `a` times the matrix of their group.

    Groups are intervals of rows, whose ends are values: rows are not sharded. The columns of the
    result may be, and the contracted dim.
    """
    shapes = call.shapes()
    if [len(shape) for shape in shapes] != [2, 3, 1]:
        return None
    inputs: tuple[Dims, ...] = ((None, "k"), (None, "k", "n"), (None,))
    return Signature(
        inputs,
        ((None, "n"),),
        {"k": "sum"},
        linear=((0,), (1,)),
        local=_padded_product,
        specialize=_aligned_product,
    ).strategy()


_ALIGNED = 16  # torch requires rows of a multiple of so many bytes, which a shard may not have


def _aligned_product(context: LocalContext) -> Callable[..., Any] | None:
    matrices = context.call.operands[1]
    local = local_shape(context.input_layout(1), tuple(matrices.shape))
    return context.call.func if not any(_missing(n, matrices) for n in local[1:]) else None


def _missing(extent: int, x: Tensor) -> int:
    """How many columns an extent lacks to be aligned; an empty one lacks all of them."""
    width = _ALIGNED // x.element_size()
    return width if extent == 0 else -extent % width


def _padded_product(context: LocalContext, args: Any, kwargs: Any) -> Tensor:
    rows, matrices = args[:2]
    columns = matrices.shape[2]
    inner, outer = (_missing(n, matrices) for n in matrices.shape[1:])
    # Zeros add nothing to the contracted dim; columns of zeros are removed again.
    rows = torch.constant_pad_nd(rows, (0, inner))
    matrices = torch.constant_pad_nd(matrices, (0, outer, 0, inner))
    result: Tensor = context.call.func(rows, matrices, *args[2:], **kwargs)
    return result.narrow(1, 0, columns)


_READS = Reads.NUMBERS | Reads.BROADCAST_PATTERN
RULES: dict[Any, Rule] = {
    F.glu: Rule("glu", _with_unsharded_dim(1, -1)),
    F.normalize: Rule("normalize", _with_unsharded_dim(2, 1)),
    **entries("one_hot", Rule("one_hot", _one_hot), (F,)),
    **entries("prelu", Rule("prelu", _prelu, _READS)),
    **entries("cosine_similarity", Rule("distance", _cosine, _READS)),
    **entries("pairwise_distance", Rule("distance", _pairwise, _READS)),
    **entries("cdist", Rule("distance", unless_refused(_cdist), _READS)),
    **entries("_grouped_mm", Rule("grouped product", _grouped_product, _READS), (torch,)),
}
