"""`deferred()`, `materialize(model)`, and where the deferred tensors of a model are."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vescale_comm.nested import field_names

from vescale_parallel._common.gradient_dtypes import keep_gradient_dtype
from vescale_parallel._common.messages import listed
from vescale_parallel._common.torch_compat import missing_for_deferred, schema_of
from vescale_parallel._deferred.recording import (
    FACTORIES,
    DeferredTensor,
    record,
    value_of,
)
from vescale_parallel._deferred.replay import replay, replaying
from vescale_parallel._errors import DeferredError

Model = TypeVar("Model", bound=nn.Module)


class _DeferringMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Ops that make tensors make deferred ones."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Steps that are being run want real memory, also when values are asked for inside of the
        # block.
        if not replaying.get():
            leaves = tree_leaves((args, kwargs))
            made = str(schema_of(func).name).rpartition("::")[2] in FACTORIES
            into_real = isinstance(kwargs.get("out"), Tensor)
            if any(isinstance(one, DeferredTensor) for one in leaves) or (made and not into_real):
                return record(func, args, kwargs)
        return func(*args, **kwargs)


@contextmanager
def deferred() -> Iterator[None]:
    """Build models without storage, in the block of a `with` statement.

    Examples:
        >>> with deferred():
        ...     model = nn.Linear(1 << 20, 1 << 20)
        >>> model.weight.shape
        torch.Size([1048576, 1048576])

    Every tensor that is made inside has its shape, dtype and device, and no memory. What makes its
    values is recorded: fills, draws, arithmetic, views, `.data =`. The random generator moves as
    one device's would, at once, without drawing. `parallelize` then makes each rank's pieces only,
    bitwise what building the model on one device gives; `materialize` makes all of it.

    Code that asks for values (`.item()`, `if tensor.sum() > 0`, `.numpy()`) gets those of one
    device: the tensor is made on a scratch for that moment. Tensors that are made of Python's
    numbers (`torch.tensor(...)`) or of numpy's arrays are real, as their values are there already.

    Raises:
        DeferredError: inside, what asks for memory: `data_ptr()`, pickling, `resize_`; at once, a
            torch that lacks what this needs of it.
    """
    missing = missing_for_deferred()
    if missing:
        raise DeferredError(
            f"deferred() needs {listed(missing)} of torch, which {torch.__version__} does not "
            "have. Build the model without deferred()."
        )
    with _DeferringMode():  # type: ignore[no-untyped-call]
        yield


def is_deferred(model: nn.Module) -> bool:
    """Whether some parameter or buffer of a model has no storage yet."""
    return any(
        isinstance(one, DeferredTensor)
        for tensors in (model.parameters(), model.buffers())
        for one in tensors
    )


def materialize(model: Model) -> Model:
    """Give a model that was built under `deferred()` its memory, on one device, in place.

    All values are bitwise those that building it without `deferred()` gives. Parameters become
    other objects, those that modules share stay shared. A model that is not deferred stays as it
    is. Memory: the model, and what one parameter needs to be computed.

    Raises:
        DeferredError: a value depends on a real tensor that was written to since.
    """
    made: dict[int, Tensor] = {}
    for module in list(model.modules()):
        for name, one in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if not isinstance(one, DeferredTensor):
                continue
            if id(one) not in made:
                made[id(one)] = parameter_of(one)
            setattr(module, name, made[id(one)])
    materialize_rest(model, made)
    return model


def parameter_of(parameter: DeferredTensor) -> nn.Parameter:
    """A real parameter with the values and the attributes of a deferred one."""
    made = nn.Parameter(replay(value_of(parameter)), requires_grad=parameter.requires_grad)
    for name, value in attributes_of(parameter).items():
        setattr(made, name, value)
    keep_gradient_dtype(made, parameter)
    return made


def attributes_of(parameter: Tensor) -> dict[str, Any]:
    """What users have hung on a parameter."""
    # The second is torch's mark of a parameter that is of a subclass: a plain one is told by its
    # type.
    own = {"_deferred_value", "_is_param"} if isinstance(parameter, DeferredTensor) else set()
    return {name: value for name, value in vars(parameter).items() if name not in own}


def materialize_rest(model: nn.Module, made: dict[int, Any]) -> None:
    """Make what is left in a model: buffers, and tensors in attributes and what these hold.

    Args:
        model: the model; its parameters are real or distributed.
        made: by the `id` of a deferred tensor, the tensor that is in its place.
    """

    def real(one: DeferredTensor) -> Any:
        if id(one) not in made:
            made[id(one)] = replay(value_of(one)).requires_grad_(one.requires_grad)
        return made[id(one)]

    seen: set[int] = set()
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if isinstance(buffer, DeferredTensor):
                module._buffers[name] = real(buffer)
        # Tensors that modules keep as plain attributes, in lists or in dataclasses, are no
        # parameters and no buffers, and would stay without storage.
        for name, value in list(vars(module).items()):
            if name not in ("_parameters", "_buffers", "_modules"):
                # Not by `setattr`, which would register a parameter that the module keeps as a
                # plain attribute.
                vars(module)[name] = _exchanged(value, real, seen)


def _exchanged(value: Any, real: Any, seen: set[int]) -> Any:
    """A value with real tensors in place of deferred ones; the same object where that can be.

    Args:
        value: an attribute of a module, or what is in one.
        real: gives the tensor in place of a deferred one.
        seen: ids of containers that were looked at: they may hold each other.
    """
    if isinstance(value, DeferredTensor):
        return real(value)
    if id(value) in seen:
        return value
    if isinstance(value, list | tuple):
        seen.add(id(value))
        found = [_exchanged(one, real, seen) for one in value]
        if all(new is old for new, old in zip(found, value, strict=True)):
            return value
        if isinstance(value, list):
            value[:] = found
            return value
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
    if isinstance(value, MutableMapping):
        seen.add(id(value))
        for key, one in list(value.items()):
            new = _exchanged(one, real, seen)
            if new is not one:
                value[key] = new
    for name in field_names(value):
        seen.add(id(value))
        one = getattr(value, name)
        new = _exchanged(one, real, seen)
        if new is not one:
            # Dataclasses may be frozen.
            object.__setattr__(value, name, new)
    return value
