"""Later values of plain operands, of which the first executions were compared (`plain_operands`).

From then on a digest of what they hold is taken now and then, and becomes part of the lineage of
the result: a batch that is another one on some rank shows where that result is communicated.
"""

from __future__ import annotations

from typing import Any

from vescale_dtensor._dispatch.plain_operands import is_comparable
from vescale_dtensor._fast_path.cache import CompiledCall
from vescale_dtensor._planning.op_call import OpCall
from vescale_dtensor._planning.plan import mesh_of
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._tensor.value_digest import sampled_digests


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
        if type(result) is DTensor:
            values = sampled_digests(mesh, [args[place] for place in places])
            if values:
                result._lineage = hash((result._lineage, *values))
        return result

    return run
