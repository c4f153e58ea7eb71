"""Operators of `torch.ops.aten` that are called directly, each as the function of its name.

`torch.ops.aten.mm` and `torch.mm` are one operator and take the same arguments: torch generates the
functions of its namespaces in C from the schemas of the operators. A rule is for such a function,
so a call of the operator is answered as one of the function. Functions that are written in Python
may take other arguments, and are none of these.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from vescale_dtensor._dispatch.registry import has_entry
from vescale_dtensor._torch.compat import generated_namespaces, name_of_overload, returns_list


def as_function(func: Any) -> Callable[..., Any] | None:
    """Return what answers an operator of aten; None for one that no rule is for, or no operator.

    It takes the operator's arguments, and returns what the operator does.
    """
    if name_of_overload(func) is None or has_entry(func):
        return None
    return _function_of(func)


@lru_cache(maxsize=4096)
def _function_of(operator: Any) -> Callable[..., Any] | None:
    packet = name_of_overload(operator)
    namespace, _, name = str(packet._qualified_op_name).partition("::")
    # Private operators (`_fused_adamw_`) take operands that a rule of their function may refuse, as
    # nobody but torch's own Python calls that.
    if namespace != "aten" or name.startswith("_"):
        return None
    found = [getattr(place, name, None) for place in generated_namespaces]
    known = [f for f in found if f is not None and has_entry(f)]
    if not known:
        return None
    function, as_list = known[0], returns_list(operator)

    def answer(*args: Any, **kwargs: Any) -> Any:
        if "self" in kwargs:  # the schema's name for what functions call `input`
            args = (kwargs.pop("self"), *args)
        result = function(*args, **kwargs)
        return list(result) if as_list and isinstance(result, tuple) else result

    return answer
