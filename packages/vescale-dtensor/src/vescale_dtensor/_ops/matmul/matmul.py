"""Matrix products: batch, free and contracted dims may all be sharded."""

from __future__ import annotations

from collections.abc import Sequence

from vescale_dtensor._ops.common.empty_shards import pads_empty
from vescale_dtensor._ops.common.functions import both_forms, entries
from vescale_dtensor._ops.common.letters import added_letters, broadcast_letters, letters
from vescale_dtensor._ops.common.sharded_dim import unless_refused
from vescale_dtensor._planning import Dims, OpCall, Reads, Rule, Signature, Strategy

_CONTRACTED = "k"


def product_letters(left: Sequence[int], right: Sequence[int]) -> tuple[Dims, Dims, Dims]:
    """Letters of `torch.matmul` for operands of these shapes."""
    if len(left) == 1 and len(right) == 1:
        return ("k",), ("k",), ()
    batches = [tuple(left[:-2]), tuple(right[:-2])]
    (first, second), batch = broadcast_letters(batches)
    rows: Dims = ("m",) if len(left) > 1 else ()
    columns: Dims = ("n",) if len(right) > 1 else ()
    return (*first, *rows, "k"), (*second, "k", *columns), (*batch, *rows, *columns)


def _matmul(call: OpCall) -> Strategy | None:
    left, right = call.shapes()
    if not left or not right:
        return None
    a, b, out = product_letters(left, right)
    # Linear in each operand alone: of two partial operands the local products would lack the
    # products across ranks. An empty shard of "k" gives zeros, which add nothing to the sum.
    return Signature((a, b), (out,), {_CONTRACTED: "sum"}, linear=((0,), (1,))).strategy()


def _linear(call: OpCall) -> Strategy | None:
    shapes = call.shapes()
    batch = letters(len(shapes[0]) - 1)
    # The weight is [out, in]: column-parallel layers shard its dim 0, row-parallel ones its dim 1.
    # There the bias is added on coordinate 0 only.
    weight: Dims = ("n", "k") if len(shapes[1]) == 2 else ("k",)
    free = weight[:-1]
    inputs: list[Dims] = [(*batch, "k"), weight]
    if len(shapes) == 3:
        inputs.append(free)
    added = (2,) if len(shapes) == 3 else ()
    return Signature(
        tuple(inputs),
        ((*batch, *free),),
        {_CONTRACTED: "sum"},
        linear=((0,), (1,)),
        bias_operands=added,
    ).strategy()


def _bilinear(call: OpCall) -> Strategy | None:
    """`bilinear(input1, input2, weight, bias)`: both widths are contracted."""
    shapes = call.shapes()
    if len(shapes[2]) != 3 or len(shapes[0]) != len(shapes[1]) or not shapes[0]:
        return None
    batch = letters(len(shapes[0]) - 1)
    inputs: list[Dims] = [(*batch, "i"), (*batch, "j"), ("n", "i", "j"), ("n",)]
    # Summed over "i" and "j": on two mesh axes both may be sharded, each giving a partial sum.
    inputs, output = inputs[: len(shapes)], (*batch, "n")
    signature = Signature(
        tuple(inputs),
        (output,),
        {"i": "sum", "j": "sum"},
        linear=((0,), (1,), (2,)),
        bias_operands=(3,) if len(shapes) == 4 else (),
    )
    return pads_empty(signature).strategy()


def _addmm(call: OpCall) -> Strategy | None:
    """`beta * c + alpha * a @ b`, with `c` broadcast to the product.

    `c` is a bias: where the contracted dim is sharded, it is added on coordinate 0 only.
    """
    shapes = call.shapes()
    if len(shapes) != 3 or len(shapes[1]) != len(shapes[2]):
        return None
    # The bias is broadcast to the product: it has the letters of the dims whose extents it has.
    a, b, out = product_letters(shapes[1], shapes[2])
    bias = added_letters(shapes[0], out, [*shapes[1][:-1], shapes[2][-1]])
    if bias is None:
        return None
    return Signature(
        (bias, a, b), (out,), {_CONTRACTED: "sum"}, linear=((1,), (2,)), bias_operands=(0,)
    ).strategy()


RULES = {
    **entries(
        "matmul mm bmm mv dot __matmul__", Rule("matmul", unless_refused(_matmul), Reads.SHAPES)
    ),
    **entries("linear", Rule("linear", unless_refused(_linear), Reads.BROADCAST_PATTERN)),
    **entries("bilinear", Rule("bilinear", unless_refused(_bilinear), Reads.BROADCAST_PATTERN)),
    **both_forms("addmm baddbmm", Rule("addmm", unless_refused(_addmm), Reads.SHAPES)),
}
