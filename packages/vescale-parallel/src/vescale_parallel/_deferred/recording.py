"""The class of tensors without storage, and what records the ops that are called on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from vescale_dtensor import DTensor
from vescale_rng.streams import position

from vescale_parallel._common.torch_compat import plain_functions, schema_of, wrapper_of
from vescale_parallel._deferred.draws import Draw, generator_of, is_random, skipped
from vescale_parallel._deferred.replay import replay
from vescale_parallel._deferred.tape import Buffer, Constant, Fill, Step, Value, names_of
from vescale_parallel._deferred.truncated_normal import asked_for
from vescale_parallel._errors import DeferredError

_SMALL: Final = 4096
"""Elements of a real tensor that is copied when a step reads it: then it may be written to."""

_OVERWRITING: Final = names_of(
    "fill_ zero_ copy_ uniform_ normal_ bernoulli_ random_ exponential_ log_normal_ geometric_ "
    "cauchy_"
)
_SHAPES_ONLY: Final = names_of(
    "empty_like zeros_like ones_like full_like rand_like randn_like randint_like "
    "new_empty new_zeros new_ones new_full new_empty_strided"
)
"""Ops that read the shape, dtype and device of a tensor, and none of its elements."""

FACTORIES: Final = _SHAPES_ONLY | names_of(
    "empty empty_strided zeros ones full eye arange linspace logspace rand randn randint randperm "
    "tril_indices triu_indices normal hann_window hamming_window bartlett_window blackman_window "
    "kaiser_window empty_permuted"
)
"""Ops that make tensors from numbers and shapes."""

_REFUSED: Final = {
    "set_": "gives a tensor other memory",
    "resize_": "changes the size of memory",
    "resize_as_": "changes the size of memory",
}


_TURNED: Final = names_of("t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_ as_strided_")
"""Ops that make a tensor another view of its memory."""


class DeferredTensor(Tensor):
    """A tensor without storage, that knows which steps make its values.

    It answers for shape, dtype and device as the tensor of one device would. What asks for values
    (`.item()`, `if tensor > 0`, `.numpy()`) gets those of one device: the tensor is made for that
    moment. What asks for memory (`data_ptr`, pickling) raises `DeferredError`.
    """

    _deferred_value: Value

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Record an op."""
        return record(func, args, dict(kwargs or {}))

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Handle what does not come to an op: `.data =`, and conversions to Python's objects."""
        kwargs = kwargs or {}
        if any(issubclass(one, DTensor) for one in types):
            # What a distributed tensor computes with has memory.
            return func(*tree_map(real, tuple(args)), **tree_map(real, kwargs))
        special = _SPECIAL.get(func)
        with plain_functions():
            return special(*args, **kwargs) if special else func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy that is written to on its own, with the attributes of this one."""
        if id(self) not in memo:
            copied = self.detach().clone().requires_grad_(self.requires_grad)
            memo[id(self)] = copied
            for name, value in vars(self).items():
                if name != "_deferred_value":
                    setattr(copied, name, value)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse: there is nothing to store."""
        raise DeferredError(_no_storage("it was pickled or saved"))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        shape, dtype = tuple(self.shape), str(self.dtype).removeprefix("torch.")
        return f"DeferredTensor({shape}, {dtype}, device='{self.device}')"


def _is_deferred(one: Any) -> bool:
    return isinstance(one, DeferredTensor)


def value_of(tensor: DeferredTensor) -> Value:
    """What a deferred tensor is on the tape."""
    return tensor._deferred_value


def tensor_of(value: Value) -> DeferredTensor:
    """A deferred tensor of a value."""
    meta = value.meta
    made: DeferredTensor = wrapper_of(DeferredTensor, meta, value.device)
    made._deferred_value = value
    return made


def real(tensor: Any) -> Any:
    """A deferred tensor with its values, made on real memory; anything else as it is."""
    return replay(tensor._deferred_value) if isinstance(tensor, DeferredTensor) else tensor


def record(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Record the call of an op, and return deferred tensors; or run it, where values are asked for.

    Raises:
        DeferredError: it changes the memory of a tensor.
    """
    name = _name_of(func)
    # Between two tensors of one form `set_` only changes whose values these are. Any other use
    # would change what is known of the memory, and is refused below.
    if func is torch.ops.aten.set_.source_Tensor and _alike(*args):
        args[0]._deferred_value = args[1]._deferred_value
        return args[0]
    if name in _TURNED:
        return _turned(func, name, args, kwargs)
    if name == "resize_" and tuple(args[1]) == tuple(args[0].shape):
        return args[0]  # as factories do with `out=`
    if name in _REFUSED:
        raise DeferredError(
            f"{name} {_REFUSED[name]}, and was called on a tensor that deferred() built without "
            "any. Build that tensor outside of deferred(), or write to it with copy_."
        )
    arguments = _bound(func, args, kwargs)
    # Values decide what comes out (or the result is no tensor): it runs now, on tensors that are
    # made for it.
    if not _is_recordable(func, arguments):
        return func(*tree_map(real, tuple(args)), **tree_map(real, kwargs))
    device = _device_of(func, arguments)
    # Asked for on the meta device, it has no values, and there is nothing to record.
    if device.type == "meta":
        return func(*tree_map(_meta, tuple(args)), **(tree_map(_meta, kwargs)))
    kwargs = _explicit(func, arguments, kwargs, device)
    # The op runs on the meta tensors themselves, in place: what it does to their shapes cannot be
    # undone, but is refused.
    before = [one._deferred_value.meta.shape for one in _written(func, arguments)]
    made = _shapes(func, arguments, args, kwargs)
    if [one._deferred_value.meta.shape for one in _written(func, arguments)] != before:
        raise DeferredError(f"{name} changed the shape of a tensor in place under deferred().")
    if "dtype" in kwargs and kwargs["dtype"] is None and isinstance(made, Tensor):
        kwargs["dtype"] = made.dtype
    draw = _draw(func, name, arguments, args, kwargs, made, device)
    noted_args, noted_kwargs = tree_map(_noted, (tuple(args), kwargs))
    step = Step(name, func, noted_args, noted_kwargs, draw, torch.get_default_dtype())
    step.reads = name not in _SHAPES_ONLY
    return _returned(step, name, arguments, made, device)


def _turned(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Let a tensor be another view of its memory, as `orthogonal_` turns matrices that are wide."""
    packet = getattr(torch.ops.aten, name.removesuffix("_"))
    # Overloads have the names of those in place, but for `transpose.int`.
    overload = func._overloadname if func._overloadname in packet.overloads() else "int"
    made = record(getattr(packet, overload), args, kwargs)
    with plain_functions():
        torch.Tensor.data.__set__(args[0], made)  # type: ignore[attr-defined]
    args[0]._deferred_value = made._deferred_value
    return args[0]


def _shapes(
    func: Any, arguments: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """What an op returns, on the meta device."""
    try:
        return func(*tree_map(_meta, tuple(args)), **_for_meta(kwargs))
    except NotImplementedError:
        if any(one.alias_info for one in (*schema_of(func).arguments, *schema_of(func).returns)):
            raise DeferredError(
                f"torch cannot tell the shape that {func} returns without running it, and it "
                "writes to a tensor that deferred() built without storage. Build that part of the "
                "model outside of deferred()."
            ) from None
    # It runs once, so that its shapes are known, and again when its values are wanted. What it
    # draws here is drawn again from the same place by `_draw`.
    generator = generator_of(arguments, _device_of(func, arguments)) if is_random(func) else None
    state = None if generator is None else generator.get_state()
    made = func(*tree_map(real, tuple(args)), **tree_map(real, dict(kwargs)))
    if generator is not None and state is not None:
        generator.set_state(state)
    return tree_map(lambda one: one.to("meta") if isinstance(one, Tensor) else one, made)


def _alike(one: Tensor, other: Tensor) -> bool:
    """Whether one tensor can become another by sharing its memory, and nothing else."""
    if not (isinstance(one, DeferredTensor) and isinstance(other, DeferredTensor)):
        return False
    a, b = one._deferred_value, other._deferred_value
    same = (a.meta.shape, a.meta.dtype, a.device) == (b.meta.shape, b.meta.dtype, b.device)
    places = a.meta.stride(), a.meta.storage_offset(), b.meta.stride(), b.meta.storage_offset()
    return same and places[:2] == places[2:]


def _name_of(func: Any) -> str:
    return str(schema_of(func).name).rpartition("::")[2]


def _bound(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by the names of the schema, defaults included."""
    bound = {}
    for place, one in enumerate(schema_of(func).arguments):
        if place < len(args):
            bound[one.name] = args[place]
        elif one.name in kwargs:
            bound[one.name] = kwargs[one.name]
        elif one.has_default_value():
            bound[one.name] = one.default_value
    return bound


def _written(func: Any, arguments: Mapping[str, Any]) -> list[Any]:
    """The tensors that an op writes to."""
    written = [one.name for one in schema_of(func).arguments if one.alias_info and one.is_write]
    found = tree_leaves([arguments.get(name) for name in written])
    return [one for one in found if isinstance(one, Tensor)]


def _is_recordable(func: Any, arguments: Mapping[str, Any]) -> bool:
    """Whether shapes are all that is needed now."""
    returns = schema_of(func).returns
    tensors = returns and all(str(one.type) in ("Tensor", "List[Tensor]") for one in returns)
    asks = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
    # What is written to a real tensor is wanted there now.
    return (
        bool(tensors or not returns)
        and not asks
        and all(isinstance(one, DeferredTensor) for one in _written(func, arguments))
    )


def _device_of(func: Any, arguments: Mapping[str, Any]) -> torch.device:
    if arguments.get("device") is not None:
        return torch.device(arguments["device"])
    tensors = [one for one in tree_leaves(dict(arguments)) if isinstance(one, Tensor)]
    # A number in a tensor goes along with tensors of any device.
    tensors.sort(key=lambda one: one.ndim == 0)
    return tensors[0].device if tensors else torch.device("cpu")


def _explicit(
    func: Any, arguments: Mapping[str, Any], kwargs: dict[str, Any], device: torch.device
) -> dict[str, Any]:
    """Keyword arguments with what may be another default when the step runs."""
    names = {one.name for one in schema_of(func).arguments}
    said = dict(kwargs)
    if {"device", "dtype", "layout"} <= names and _name_of(func) in FACTORIES:
        said["device"] = device
        said.setdefault("dtype", arguments.get("dtype"))
    return said


def _for_meta(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    meta = {key: tree_map(_meta, one) for key, one in kwargs.items()}
    if meta.get("device") is not None:
        meta["device"] = torch.device("meta")
    if meta.get("pin_memory"):
        meta["pin_memory"] = False
    return meta


def _meta(one: Any) -> Any:
    if isinstance(one, DeferredTensor):
        return one._deferred_value.meta
    if isinstance(one, Tensor) and one.device.type != "meta":
        # A number stays: ops on the meta device take it, with its kind of promotion.
        return one.to("meta") if one.ndim or one.device.type != "cpu" else one
    return None if isinstance(one, torch.Generator) else one


def _noted(one: Any) -> Any:
    if isinstance(one, DeferredTensor):
        return one._deferred_value
    if isinstance(one, Tensor):
        # Large ones are not copied, as memory is what this spares: their version tells whether
        # somebody has written to them.
        kept = one.detach().clone() if one.numel() <= _SMALL else one
        return Constant(kept, kept._version)
    return one


def _draw(
    func: Any,
    name: str,
    arguments: Mapping[str, Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    made: Any,
    device: torch.device,
) -> Draw | None:
    """Leave the generator where the op leaves it, and tell where it was."""
    if not is_random(func):
        return None
    generator = generator_of(arguments, device)
    target = made if isinstance(made, Tensor) else None
    draw = None if target is None else skipped(name, arguments, target, generator)
    if draw is not None:
        return draw
    # Only the op knows: it runs, and what it drew is dropped until the value is wanted.
    start = position(generator)
    func(*tree_map(real, tuple(args)), **tree_map(real, dict(kwargs)))
    return Draw(None, generator, start)


def _returned(
    step: Step, name: str, arguments: Mapping[str, Any], made: Any, device: torch.device
) -> Any:
    """Deferred tensors for what an op made; the same objects for those it wrote to."""
    written = _written(step.func, arguments)
    known = {id(one._deferred_value.meta): one for one in written}
    values = [one._deferred_value for one in tree_leaves(dict(arguments)) if _is_deferred(one)]
    # With the storages, which are alive so: an `id` names one of them only while it lives.
    buffers = {id(s): (s, v.buffer) for v in values for s in (v.meta.untyped_storage(),)}
    count = 0

    def returned(meta: Any) -> Any:
        nonlocal count
        if not isinstance(meta, Tensor):
            return meta
        place, count = count, count + 1
        if id(meta) in known:
            return known[id(meta)]
        storage = meta.untyped_storage()
        if id(storage) in buffers:
            buffer = buffers[id(storage)][1]
            step.is_view = not written and not step.overwrites
        else:
            buffer = Buffer(storage.nbytes(), [step])
            buffers[id(storage)] = (storage, buffer)
            step.overwrites = True
        value = Value(buffer, meta, device, step, place)
        step.made.append(value)
        return tensor_of(value)

    result = tree_map(returned, made)
    for one in written:
        value = one._deferred_value
        step.written.append(value)
        value.buffer.writers.append(step)
    step.overwrites |= _leaves_nothing(step, name)
    return result


def _leaves_nothing(step: Step, name: str) -> bool:
    if name not in _OVERWRITING or len(step.written) != 1 or not step.written[0].is_whole:
        return False
    target = step.written[0]
    # Once as what is written: `p.copy_(p)` reads it as well.
    return [one for one in step.values if one.buffer is target.buffer] == [target]


def fill_with(tensor: DeferredTensor, fill: Fill, draw: Draw | None = None) -> None:
    """Record that all of a tensor is written, and from which place it is drawn, if it is."""
    value = tensor._deferred_value
    step = Step(type(fill).__name__, fill, (value,), {}, draw, torch.get_default_dtype())
    step.written.append(value)
    step.overwrites = value.is_whole
    value.buffer.writers.append(step)


def _set_data(tensor: Tensor, new: Tensor) -> None:
    """`tensor.data = new`."""
    if not isinstance(tensor, DeferredTensor):
        tensor.data = real(new)
        return
    if not isinstance(new, DeferredTensor):
        # A copy: what is written to a real tensor later cannot be seen from here.
        copied: DeferredTensor = record(torch.ops.aten.clone.default, (new.detach(),), {})
        new = copied
    torch.Tensor.data.__set__(tensor, new)  # type: ignore[attr-defined]
    tensor._deferred_value = new._deferred_value


def _is_meta(tensor: DeferredTensor) -> bool:
    """False; but `torch.nn.init.trunc_normal_` asks before it draws, and is served here."""
    wanted = asked_for()
    if wanted is None:
        return False
    value = tensor._deferred_value
    if not value.meta.is_contiguous():
        return False
    func, generator = wanted
    place = func.skipped(value.meta.shape, value.meta.dtype, generator)
    if place is None:
        return False
    fill_with(tensor, func, Draw(None, generator, place))
    # As of a tensor on the meta device, of which torch leaves the filling to nobody.
    return True


def _refused(name: str) -> Callable[..., Any]:
    def refuse(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        raise DeferredError(_no_storage(f"{name} was asked for"))

    return refuse


def _no_storage(what: str) -> str:
    return (
        f"a tensor that was built under deferred() has no storage, and {what}. Give it some first: "
        "parallelize(model, mesh, plan), or materialize(model) on one device."
    )


_SPECIAL: Final[dict[Any, Callable[..., Any]]] = {
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    Tensor.is_meta.__get__: _is_meta,  # type: ignore[attr-defined]
    Tensor.numpy: lambda tensor, **kwargs: real(tensor).numpy(**kwargs),
    Tensor.tolist: lambda tensor: real(tensor).tolist(),
    Tensor.__array__: lambda tensor, *args: real(tensor).__array__(*args),
    **{
        getattr(Tensor, name): _refused(name)
        for name in ("data_ptr", "untyped_storage", "storage", "share_memory_", "pin_memory")
    },
}
