"""Linear algebra on batches of matrices: the dims before the matrix may be sharded.

The table says how many trailing dims of each operand and result belong to one matrix (or vector, or
number). A matrix that torch refuses (a singular one, say) is refused by the ranks that hold it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch

from vescale_dtensor._layout.placements import Replicate, Shard
from vescale_dtensor._ops.common.functions import functions
from vescale_dtensor._ops.common.letters import broadcast_letters
from vescale_dtensor._ops.common.reshard_offer import offer_reshard
from vescale_dtensor._ops.common.sharded_dim import unless_refused
from vescale_dtensor._planning import (
    AxisStrategy,
    Dims,
    LocalContext,
    OpCall,
    Reads,
    Rule,
    Signature,
    Strategy,
)

_TABLE: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "cholesky cholesky_inverse inv inverse pinverse matrix_exp matrix_power": ((2,), (2,)),
    "cholesky_ex inv_ex": ((2,), (2, 0)),
    "det logdet cond": ((2,), (0,)),
    "slogdet": ((2,), (0, 0)),
    "eigvals eigvalsh svdvals": ((2,), (1,)),
    "eig eigh": ((2,), (1, 2)),
    "svd": ((2,), (2, 1, 2)),
    "qr": ((2,), (2, 2)),
    "lu_factor ldl_factor": ((2,), (2, 1)),
    "lu_factor_ex ldl_factor_ex": ((2,), (2, 1, 0)),
    "geqrf": ((2,), (2, 1)),
    "lu_unpack": ((2, 1), (2, 2, 2)),
    "cholesky_solve": ((2, 2), (2,)),
    "solve_triangular": ((2, 2), (2,)),
    "triangular_solve": ((2, 2), (2, 2)),
    "ldl_solve": ((2, 1, 2), (2,)),
    "householder_product orgqr": ((2, 1), (2,)),
    "ormqr": ((2, 1, 2), (2,)),
}


def _batched(
    operands: tuple[int, ...], outputs: tuple[int, ...]
) -> Callable[[OpCall], Strategy | None]:
    def strategy(call: OpCall) -> Strategy | None:
        shapes = call.shapes()
        if len(shapes) != len(operands) or _leaves_out(call):
            return None
        if any(len(shape) < core for shape, core in zip(shapes, operands, strict=True)):
            return None
        found = _of_cores(call, operands, outputs)
        tied = call.differentiable and call.func.__name__.endswith(_UNTIED)
        return replace(found, local=_tied) if found is not None and tied else found

    return strategy


# For an empty batch, torch's backward of these gives no gradient at all, where other ranks have
# one: the collectives that follow would not match.
_UNTIED = ("householder_product", "orgqr", "ormqr", "cond")


def _tied(context: LocalContext, args: Any, kwargs: Any) -> torch.Tensor:
    """The function itself, with a result that depends on all operands, also where it is empty."""
    result: torch.Tensor = context.call.func(*args, **kwargs)
    # Only in the local graph: no rank communicates here, so that this may depend on the rank.
    if result.numel():
        return result
    # The result has no elements: what is added makes an edge in the graph, and no difference.
    sums = [x.sum() for x in args if isinstance(x, torch.Tensor)]
    # Its dtype stays: the condition number of complex matrices is real.
    return result + sum((s if result.is_complex() else torch.real(s)) * 0 for s in sums)


def _leaves_out(call: OpCall) -> bool:
    """Whether a flag asks for less than all results: torch then gives some without batch dims."""
    values = (*call.args, *call.kwargs.values())
    # By type first: a tensor that is compared with a string runs an op.
    return any(isinstance(value, str) and value == "r" for value in values) or any(
        value is False for name, value in call.kwargs.items() if name in _PARTS
    )


_PARTS = ("pivot", "unpack_data", "unpack_pivots", "compute_uv")


def _of_cores(call: OpCall, operands: tuple[int, ...], outputs: tuple[int, ...]) -> Strategy | None:
    pairs = list(zip(call.shapes(), operands, strict=True))
    batches = [shape[: len(shape) - core] for shape, core in pairs]
    try:
        # On global shapes: all ranks leave to the fallback what does not fit.
        torch.broadcast_shapes(*batches)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return None
    letters, batch = broadcast_letters(batches)
    inputs: list[Dims] = [
        (*own, *(None,) * core) for own, core in zip(letters, operands, strict=True)
    ]
    results = [(*batch, *(None,) * core) for core in outputs]
    if call.func.__name__ == "linalg_solve_ex":
        results[1] = letters[0]  # whether each matrix could be solved
    # On meta tensors torch gives results of these row-major, unlike those on a device.
    real = call.func.__name__ in ("geqrf", "linalg_eig", "svd", "linalg_svd")
    probe: Literal["meta", "real"] = "real" if real else "meta"
    strategy = Signature(tuple(inputs), tuple(results), probe_order=probe).strategy()
    return offer_reshard(call, strategy)


def _tolerant(core: int) -> Callable[[OpCall], Strategy | None]:
    """`pinv` and `matrix_rank`: tolerances may be tensors, one for each matrix."""

    def strategy(call: OpCall) -> Strategy | None:
        more = len(call.operands) - 1
        if not call.operands or call.operands[0].ndim < 2:
            return None
        if call.operands[0] is not (call.args[0] if call.args else None):
            return None
        return _of_cores(call, (2, *(0,) * more), (core,))

    return strategy


def _solve(call: OpCall) -> Strategy | None:
    """`solve(A, B)`: B is a batch of vectors where its shape is that of A without the last dim."""
    if len(call.operands) != 2:
        return None
    a, b = call.shapes()
    # By the global shapes: local ones may look like vectors on some ranks only.
    vector = len(b) == 1 or (len(a) - 1 == len(b) and b == a[:-1])
    core = 1 if vector else 2
    if len(a) < 2 or len(b) < core:
        return None
    outputs = (core, 0) if call.func.__name__.endswith("_ex") else (core,)
    return _of_cores(call, (2, core), outputs)


def _least_squares(call: OpCall) -> Strategy | None:
    """`lstsq(A, B, rcond, driver)`, as it is on a CPU.

    Residuals, ranks and singular values that the driver does not compute are empty on every rank.
    """
    if len(call.operands) != 2:
        return None
    a, b = call.shapes()
    driver = call.argument(3, "driver") or "gelsy"
    if len(a) != len(b) or len(a) < 2 or a[:-2] != b[:-2] or call.operands[0].device.type != "cpu":
        return None
    tall, decomposed = a[-2] > a[-1], driver in ("gelss", "gelsd")
    if tall and decomposed:
        return None  # residuals are empty unless all matrices have full rank: values decide
    batch = tuple(range(len(a) - 2))
    dims: Dims = (*batch, None, None)
    residuals: Dims = (*batch, None) if tall and driver == "gels" else (None,)
    numbers: Dims = (None,) if driver == "gels" else batch
    outputs = (dims, residuals, numbers, (*batch, None) if decomposed else (None,))
    base = Signature((dims, dims), outputs).strategy()
    rows = [
        AxisStrategy((Shard(d),) * 2, tuple(Shard(d) if d in o else Replicate() for o in outputs))
        for d in batch
    ]
    columns = (*batch, len(a) - 1, len(a) - 2)  # LAPACK's order, whatever that of the operands
    orders = (columns, None, None, None)
    return offer_reshard(
        call, replace(base, candidates=(base.candidates[0], *rows), output_orders=orders)
    )


def _lu_solve(call: OpCall) -> Strategy | None:
    """Two functions, whose operands come in different orders."""
    new = call.func.__name__.startswith("linalg")
    return _batched((2, 1, 2) if new else (2, 2, 1), (2,))(call)


_READS = Reads.NUMBERS | Reads.SHAPES
_PLACES = (torch, torch.Tensor, torch.linalg)
# Where functions are that are left only to raise that they were removed: `torch.linalg` has them.
_REMOVED = "torch._linalg_utils"


def _places(name: str) -> tuple[Any, ...]:
    """Where the functions of linear algebra of a name are to be found, in the installed torch."""
    former = getattr(torch, name, None)
    # `torch.cond` is a branch of a program.
    other = name == "cond" or getattr(former, "__module__", None) == _REMOVED
    return (torch.linalg,) if other else _PLACES


def _functions_of(names: str) -> list[Any]:
    return [func for name in names.split() for func in functions(name, _places(name))]


RULES: dict[Any, Rule] = {
    **{
        f: Rule("linear algebra", unless_refused(_batched(*row)), _READS)
        for names, row in _TABLE.items()
        for f in _functions_of(names)
    },
    torch.linalg.lu: Rule("linear algebra", _batched((2,), (2, 2, 2)), _READS),
    **{f: Rule("linear algebra", _tolerant(2), _READS) for f in _functions_of("pinv")},
    **{f: Rule("linear algebra", _tolerant(0), _READS) for f in _functions_of("matrix_rank")},
    **{f: Rule("linear algebra", _solve, _READS) for f in _functions_of("solve solve_ex")},
    torch.linalg.lstsq: Rule("linear algebra", _least_squares, _READS),
    **{f: Rule("linear algebra", _lu_solve, _READS) for f in _functions_of("lu_solve")},
}
