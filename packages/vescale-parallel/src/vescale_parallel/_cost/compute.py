"""Floating-point operations of a step on one rank, and bytes of an update."""

from collections.abc import Sequence

from vescale_parallel._cost.memory import Memory
from vescale_parallel._cost.pieces import Piece
from vescale_parallel._cost.recomputation import region_of, regions_of
from vescale_parallel._cost.settings import Precision, Workload


def forward_flops(pieces: Sequence[Piece], tokens: float, work: Workload) -> float:
    """Return two for each element of a matrix and token, and causal attention."""
    return sum(_flops(one, tokens, work) for one in pieces)


def _flops(piece: Piece, tokens: float, work: Workload, kept: Sequence[str] = ()) -> float:
    """Of one parameter; families of operators that are `kept` are not computed."""
    if not piece.multiplied:
        return 0.0
    total = 0.0 if "matmul" in kept else 2 * piece.elements * tokens
    if piece.attends and "attention" not in kept:
        # Scores and their product with the values, 2 flops each, half of them masked.
        total += 2 * piece.outputs * work.sequence * tokens
    return total


def model_flops(pieces: Sequence[Piece], tokens: float, work: Workload) -> float:
    """Forward and backward, without recomputation: what a rank's share of the model needs."""
    # Of each product backward computes two: the gradients of its input and of its weight.
    return 3 * forward_flops(pieces, tokens, work)


def hardware_flops(pieces: Sequence[Piece], tokens: float, work: Workload) -> float:
    """Return what is computed: the forward of what is recomputed twice."""
    regions = regions_of(pieces, work)
    placed = ((one, region_of(one.name, regions)) for one in pieces)
    again = sum(_flops(one, tokens, work, regions[r]) for one, r in placed if r is not None)
    return model_flops(pieces, tokens, work) + again


def update_bytes(memory: Memory, dp: int, zero: int) -> float:
    """Return what an optimizer reads and writes: parameters and states twice, gradients once."""
    share = dp if zero in (1, 2) else 1  # states say what is updated here
    return 2 * memory.states + 2 * memory.parameters / share + memory.gradients


def host_update_bytes(pieces: Sequence[Piece], dp: int, precision: Precision) -> float:
    """Return what the host reads and writes to update what lies there."""
    each = 2 * precision.state + 2 * precision.stored + precision.gradient
    return sum(one.elements for one in pieces if one.offload) * each / dp
