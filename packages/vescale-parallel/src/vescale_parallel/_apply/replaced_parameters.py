"""Raises for uses of plain parameters that distributed ones have replaced in a model.

A plain tensor cannot turn into a distributed one in place (Python refuses to change the class of
an object to one with other slots), so `parallelize` makes new objects. Whoever still holds an old
one (a list kept for clipping, a moving average, a module that was tied from outside) would read
values that are trained no more, and gradients that never come, without an error. So the old object
changes its class instead, gives its memory back, and refuses every use by name.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import resolve_name
from vescale_comm.nested import named_tensors_within

from vescale_parallel._deferred.recording import DeferredTensor
from vescale_parallel._errors import StaleParameterError


class ReplacedParameter(nn.Parameter):
    """A parameter object from before `parallelize`; every torch function of it raises."""

    _replaced_name: str

    # Hashing and printing are no use of its values: dicts that hold it can be cleaned up.
    __hash__ = object.__hash__

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<parameter '{self._replaced_name}' from before parallelize>"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse: also attributes as `.grad` and `.shape` come here."""
        given = named_tensors_within([args, kwargs or {}]).values()
        name = next(one._replaced_name for one in given if isinstance(one, ReplacedParameter))
        # Getters of attributes are all called `__get__`; torch knows which is which.
        used = resolve_name(func) or getattr(func, "__name__", str(func))
        raise StaleParameterError(
            f"{used} of the object that was parameter '{name}' before "
            "parallelize: the model has another one now, and this one is trained no more. Take "
            f"parameters from the model after parallelize: model.get_parameter('{name}'), "
            "list(model.parameters()), copies and averages of the model. (Optimizers made before "
            "have been given the new parameters.)"
        )


def retire(parameter: nn.Parameter, name: str) -> None:
    """Let a parameter that was replaced refuse its use from now on, and free its memory."""
    # What shares the storage (an earlier state_dict) keeps it, and its values.
    if not isinstance(parameter, DeferredTensor):
        parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    # Subclasses with slots of their own keep their class; being empty, they fit nothing any more.
    with contextlib.suppress(TypeError):
        parameter.__class__ = ReplacedParameter
        parameter._replaced_name = name  # type: ignore[attr-defined]
