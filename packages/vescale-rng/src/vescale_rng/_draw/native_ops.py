"""Random operators of torch, which draw by the native policy's map wherever torch runs them.

Which they are, whether a call draws, and their refusal under another policy.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vescale_rng._policy import policy, require_native

# Tagged as random by torch, and drawing nothing: a choice of kernel, a mask made anew of its seed.
_DRAW_NOTHING = frozenset(
    (
        "_fused_sdp_choice",
        "_fill_mem_eff_dropout_mask_",
        "_flash_attention_forward_no_dropout_inplace",
        "_nested_tensor_softmax_with_shape",
    )
)


def is_random(func: Any) -> bool:
    """Tell whether an op of ATen may draw from a generator."""
    known = _random.get(func)
    if known is None:
        tags = getattr(func, "tags", ())
        name = func._schema.name.partition("::")[2] if hasattr(func, "_schema") else ""
        # torch tags every op that may use a generator: none is missed, also those that this
        # package has no rule for.
        known = torch.Tag.nondeterministic_seeded in tags
        known = known and name not in _DRAW_NOTHING and "backward" not in name
        # Bounded by the operators of the process.
        _random[func] = known
    return known


# Asked at every op of a block, so it has to cost one look-up.
_random: dict[Any, bool] = {}


def named_arguments(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call by the names of its schema, defaults included."""
    found = {}
    for index, argument in enumerate(op._schema.arguments):
        # By the schema: autograd and dispatch modes pass defaults by position, by name or not at
        # all.
        given = args[index] if index < len(args) else argument.default_value
        # `self` and `from` are no names that a Python function can have.
        name = {"self": "input", "from": "low"}.get(argument.name, argument.name)
        found[name] = kwargs.get(argument.name, given)
    return found


def draws_nothing(named: dict[str, Any]) -> bool:
    """Tell whether the arguments of a random op say that it draws nothing this time."""
    off = any(named.get(name) is False for name in ("train", "training"))
    return off or any(named.get(name) == 0 for name in ("dropout_p", "dropout"))


@contextmanager
def no_native_draws(what: str) -> Iterator[None]:
    """Refuse what torch would draw by itself in the `with` block, unless the policy is "native".

    For layers above that run an operator of torch on global tensors: what it draws is the native
    policy's map.

    Args:
        what: whose draws these are, for the error.

    Raises:
        PolicyError: inside, before anything is drawn; it names `what` and the op.
    """
    if policy() == "native":
        yield
        return
    with _RefusalMode(what):
        yield


class _RefusalMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, what: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._what = what

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # Not `random_`, by which a key of the policy itself is drawn.
        drawn = is_random(func) and func._schema.name != "aten::random_"
        if drawn and not draws_nothing(named_arguments(func, args, kwargs)):
            require_native(f"{self._what} ({func})")
        return func(*args, **kwargs)
