"""Floating-point operations of a step on one rank, and bytes of an update."""

from collections.abc import Sequence

from vescale_parallel._cost.memory import Memory
from vescale_parallel._cost.pieces import Piece
from vescale_parallel._cost.settings import Workload


def forward_flops(
    pieces: Sequence[Piece], tokens: float, work: Workload, *, units_only: bool = False
) -> float:
    """Two for each element of a matrix and token, and causal attention."""
    total = 0.0
    for piece in pieces:
        if not piece.multiplied or (units_only and piece.is_head):
            continue
        total += 2 * piece.elements * tokens
        if piece.attends:
            # Scores and their product with the values, 2 flops each, half of them masked.
            total += 2 * piece.outputs * work.sequence * tokens
    return total


def model_flops(pieces: Sequence[Piece], tokens: float, work: Workload) -> float:
    """Forward and backward, without recomputation: what a rank's share of the model needs."""
    return 3 * forward_flops(pieces, tokens, work)


def hardware_flops(pieces: Sequence[Piece], tokens: float, work: Workload) -> float:
    """What is computed: with recomputation the units' forward twice."""
    again = forward_flops(pieces, tokens, work, units_only=True) if work.recompute else 0.0
    return model_flops(pieces, tokens, work) + again


def update_bytes(memory: Memory, dp: int, zero: int) -> float:
    """Bytes that an optimizer reads and writes: parameters and states both ways, gradients once."""
    share = dp if zero in (1, 2) else 1  # states say what is updated here
    return 2 * memory.states + 2 * memory.parameters / share + memory.gradients
