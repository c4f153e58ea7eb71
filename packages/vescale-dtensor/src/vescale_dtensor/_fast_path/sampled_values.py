"""Later values of plain operands, of which the first executions were compared (`plain_operands`).

From then on a digest of what they hold is taken now and then, and becomes part of the lineage of
the result: a batch that is another one on some rank shows where that result is communicated.
"""

from __future__ import annotations

from typing import Any

import torch
from vescale_comm import ExecutionLog

from vescale_dtensor._dispatch.plain_operands import digest, is_comparable
from vescale_dtensor._fast_path.cache import CompiledCall
from vescale_dtensor._layout.executed import log_of, silent
from vescale_dtensor._planning.op_call import OpCall
from vescale_dtensor._planning.plan import mesh_of
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._torch.compat import dispatch_modes, no_torch_function

# Events of a mesh in which values are looked at: the first ones, and some of every so many. By the
# events and not by a count of these calls, which ranks may make alone.
_FIRST, _EVERY, _SOME = 256, 4096, 32


def with_sampled_values(compiled: CompiledCall, call: OpCall) -> CompiledCall:
    """The compiled call of `call`; with plain operands, one that looks at their values at times."""
    plain = {id(o) for o in call.operands if not isinstance(o, DTensor)}
    places = tuple(
        place
        for place, value in enumerate(call.args)
        if id(value) in plain and value.ndim and is_comparable(value, call)
    )
    if not places or call.kwargs.get("out") is not None:
        return compiled
    mesh = mesh_of(call)

    def run(*args: Any, **named: Any) -> Any:
        result = compiled(*args, **named)
        log = log_of(mesh)
        if log is not None and _is_looked_at(log) and type(result) is DTensor:
            values = [_value(args[place]) for place in places]
            result._lineage = hash((result._lineage, *values))
        return result

    return run


def _is_looked_at(log: ExecutionLog) -> bool:
    return (log.count < _FIRST or log.count % _EVERY < _SOME) and not silent.get()


def _value(operand: Any) -> int:
    """A digest of what it holds; 0 where nobody may look."""
    if dispatch_modes() or (operand.is_cuda and torch.cuda.is_current_stream_capturing()):
        return 0
    with torch.no_grad(), no_torch_function():
        return int(digest(operand).item())
