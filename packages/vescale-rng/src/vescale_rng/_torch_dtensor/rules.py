"""Decides for a random op in `consistent`: draw rows of the batch, raise, or let it pass."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor

from vescale_rng._distributions import Distribution, Normal, RandInt, Uniform
from vescale_rng._draw.fill import fill_
from vescale_rng._draw.native_ops import draws_nothing, named_arguments
from vescale_rng._draw.sampling import randperm
from vescale_rng._errors import LayoutError
from vescale_rng._layout.layout import ShardLayout
from vescale_rng._policy import policy, require_native
from vescale_rng._torch_dtensor.batch_rows import BatchRows, part_of
from vescale_rng._torch_dtensor.data_axes import DataAxes
from vescale_rng._torch_dtensor.empty_rows import Cannot
from vescale_rng._torch_dtensor.known_draws import KNOWN_OP, KnownDraws, can_be_known
from vescale_rng._torch_dtensor.local_shards import is_local_shard, note_local
from vescale_rng._torch_dtensor.ops import (
    DATA_DEPENDENT,
    HANDLERS,
    Placing,
    fill_made,
    held_by_placements,
)
from vescale_rng._torch_dtensor.parameters import is_parameter
from vescale_rng._torch_dtensor.row_messages import RankPart

_MADE: dict[str, Callable[..., Distribution]] = {
    "rand": lambda **_: Uniform(),
    "randn": lambda **_: Normal(),
    "randint": lambda low=0, high=0, **_: RandInt(low, high),
    "normal": lambda mean, std, **_: Normal(mean, std),
}


class BlockRule(Placing):
    """What is done with random ops inside of a block.

    Attributes:
        asks_nobody: whether a rank without rows may continue as if no rank drew.
        shards_met: whether there may be plain tensors that are shards of more than a batch.
    """

    asks_nobody = False
    shards_met = False

    def draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do what is done in the place of a random op of ATen."""
        raise NotImplementedError

    def is_whole(self, tensor: torch.Tensor) -> bool:
        """See `Placing.is_whole`."""
        whole = not isinstance(tensor, DTensor) and is_parameter(tensor)
        return whole and not self._is_shard(tensor)

    def _is_shard(self, tensor: torch.Tensor) -> bool:
        return self.shards_met and is_local_shard(tensor)

    def refuse_empty(self, cannot: Cannot) -> None:
        """Refuse a function that cannot be followed where this rank has no rows."""
        raise LayoutError(
            f"{cannot.name} of an input of shape {tuple(cannot.input.shape)} draws random numbers "
            "inside that cannot be followed where a rank has no rows, or for packed sequences: "
            "give every rank a row, and pad instead of packing"
        )


class PassRule(BlockRule):
    """Let every random op pass: plain tensors are replicated (`data=None`)."""

    asks_nobody = True

    def draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `BlockRule.draw`."""
        return drawn_whole(func, args, kwargs)

    def is_whole(self, tensor: torch.Tensor) -> bool:
        """See `Placing.is_whole`."""
        return not isinstance(tensor, DTensor)


class OneDataRankRule(PassRule):
    """Let pass what is drawn where one of several ranks has the whole batch, but into shards."""

    def __init__(self, axes: DataAxes) -> None:
        self._axes = axes

    def draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `BlockRule.draw`."""
        # Nothing was ever taken of a sharded DTensor here: the usual case, which costs one look.
        if self.shards_met:
            named = named_arguments(func, args, kwargs)
            target = _target(named)
            if is_local_shard(target) and not draws_nothing(named):
                raise _of_a_shard(func, _said(named, target))
        return drawn_whole(func, args, kwargs)

    def is_whole(self, tensor: torch.Tensor) -> bool:
        """See `Placing.is_whole`."""
        return super().is_whole(tensor) and not self._is_shard(tensor)

    def held(self, op: Any, tensor: torch.Tensor, generator: Any = None) -> ShardLayout:
        """See `Placing.held`."""
        if self._is_shard(tensor):
            raise _of_a_shard(op, _said({}, tensor))
        return super().held(op, tensor, generator)

    def local_taken(self, source: DTensor, local: torch.Tensor) -> None:
        """See `Placing.local_taken`."""
        self.shards_met |= note_local(source, local, self._axes)


class UnsaidRule(BlockRule):
    """Refuse draws of plain tensors, which may be parts of a batch: the user did not say.

    Attributes:
        data_seen: whether a module was run whose ranks each have a part of the batch.
    """

    def __init__(self) -> None:
        self.data_seen = False

    def draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `BlockRule.draw`."""
        named = named_arguments(func, args, kwargs)
        target = _target(named)
        if target is None:
            # A number or a table of a script without data ranks; with them, it may be a batch's.
            known = not self.data_seen or _is_one_number(named) or _has_generator(named)
        else:
            known = isinstance(target, DTensor) or target.ndim == 0 or is_parameter(target)
        if known or draws_nothing(named):
            return drawn_whole(func, args, kwargs)
        raise _unsaid(func, _said(named, target))

    def held(self, op: Any, tensor: torch.Tensor, generator: Any = None) -> ShardLayout:
        """See `Placing.held`."""
        if not isinstance(tensor, DTensor) and not is_parameter(tensor):
            raise _unsaid(op, _said({}, tensor))
        return held_by_placements(op, tensor)


class BatchRule(BlockRule):
    """Draw plain tensors, and DTensors on meshes without the data axes, as rows of the batch.

    Args:
        rows: what says where the rows are.
        factories: what `torch.rand(3)` and its like are: "rows", "whole", or None, which refuses.
    """

    def __init__(self, rows: BatchRows, factories: str | None) -> None:
        self._rows = rows
        self._factories = factories
        self._known = KnownDraws()

    def draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `BlockRule.draw`."""
        # Only where nobody is asked: else the other ranks would wait for this one's message.
        if func is KNOWN_OP and self._rows.asks_nobody and not self._is_shard(args[0]):
            drawn = self._known.draw(args, kwargs)
            if drawn is None:
                drawn = self._draw(func, args, kwargs)
                if can_be_known(args, kwargs):
                    self._known.remember(args, kwargs, self.held(func, args[0]))
            return drawn
        return self._draw(func, args, kwargs)

    def _draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        named = named_arguments(func, args, kwargs)
        target = _target(named)
        if target is None:
            return self._make(func, args, kwargs, named)
        if self._is_shard(target) and not draws_nothing(named):
            self._refuse(str(func), target, _of_a_shard(func, _said(named, target)))
        # What a parameter, or a DTensor that is global already, draws is known without a question;
        # 0 dims have no rows.
        if not self._of_rows(target) or target.ndim == 0 or draws_nothing(named):
            return drawn_whole(func, args, kwargs)
        name = _name(func)
        run = HANDLERS.get(name)
        if run is None or name in DATA_DEPENDENT:
            raise _not_by_rows(func, _said(named, target))
        if _is_one_row(name, target):
            # Of other ranks' parts it may be a matrix, as where a batch of one was squeezed.
            self._refuse(str(func), target, _not_by_rows(func, _said(named, target)))
        return run(self, func, **named)

    def held(self, op: Any, tensor: torch.Tensor, generator: Any = None) -> ShardLayout:
        """See `Placing.held`; every data rank must call it."""
        if self._is_shard(tensor):
            self._refuse(str(op), tensor, _of_a_shard(op, _said({}, tensor)))
        if not isinstance(tensor, DTensor):
            part, held = part_of(str(op), tensor)
            return self._rows.layout(part, held, generator or _default_generator(tensor))
        if not self._of_rows(tensor):
            return held_by_placements(op, tensor)
        try:
            layout = held_by_placements(op, tensor)
        except LayoutError as error:
            self._refuse(str(op), tensor, error)
        # A DTensor on the other axes is a part of its data rank's rows: those are what is told.
        order = layout.memory_order or tuple(range(tensor.ndim))
        part = RankPart(str(op), layout.global_shape, order)
        return self._rows.layout(part, layout, generator or _default_generator(tensor))

    def held_new(self, op: Any, tensor: torch.Tensor) -> ShardLayout:
        """See `Placing.held_new`."""
        if not self._of_rows(tensor) or self._factories == "whole":
            return held_by_placements(op, tensor)
        if self._factories == "rows":
            return self.held(op, tensor)
        raise _unknown_factory(op, _said({}, tensor))

    def local_taken(self, source: DTensor, local: torch.Tensor) -> None:
        """See `Placing.local_taken`."""
        self.shards_met |= note_local(source, local, self._rows.axes)

    def refuse_empty(self, cannot: Cannot) -> None:
        """Refuse on every rank: the others raise at their next draw."""
        try:
            super().refuse_empty(cannot)
        except LayoutError as error:
            # The other ranks come to their next draw, where this is the answer that they get.
            self._refuse(cannot.name, cannot.input, error)

    def _refuse(self, op: str, tensor: torch.Tensor, error: LayoutError) -> NoReturn:
        """Raise on every rank what forbids the draw on this one: it may be on this one alone."""
        shape = tuple(tensor.shape)
        # With no layout, as none is looked at: the message raises on every rank or, where nobody is
        # asked any more, on this one.
        part = RankPart(op, shape, tuple(range(len(shape))), trouble=str(error))
        self._rows.layout(part, None, None)
        raise error

    def _of_rows(self, tensor: torch.Tensor) -> bool:
        if isinstance(tensor, DTensor):
            return not is_parameter(tensor) and not self._rows.axes.places(tensor.device_mesh)
        return not is_parameter(tensor)

    def _make(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], named: dict[str, Any]
    ) -> Any:
        """Make a tensor of a shape: nothing tells whose rows those are."""
        # A caller who passes a generator of their own (a sampler, say) knows what it draws.
        if self._factories == "whole" or _is_one_number(named) or _has_generator(named):
            return drawn_whole(func, args, kwargs)
        empty = _empty_and_distribution(func, named)
        if self._factories is None or empty is None:
            raise _unknown_factory(func, _said(named, None))
        return fill_made(self, func, *empty)


def drawn_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw what every rank has all of: by torch itself, or under another policy by its map.

    Raises:
        PolicyError: the policy in force has no map for this op.
    """
    if policy() == "native":
        return func(*args, **kwargs)
    named = named_arguments(func, args, kwargs)
    target = _target(named)
    # A DTensor goes to its handler, which asks for the policy.
    if isinstance(target, DTensor) or draws_nothing(named):
        return func(*args, **kwargs)
    name = _name(func)
    if name in HANDLERS and name not in DATA_DEPENDENT:
        return HANDLERS[name](Placing(), func, **named)
    generator = named.get("generator")
    if name.startswith("randperm.") and name != "randperm.out":
        dtype = named.get("dtype")
        chosen = dtype if isinstance(dtype, torch.dtype) else torch.int64
        return randperm(named["n"], dtype=chosen, generator=generator).to(named.get("device"))
    empty = _empty_and_distribution(func, named) if target is None else None
    if empty is None:
        require_native(str(func))
        raise AssertionError("the native policy was asked for above")
    return fill_(*empty, generator=generator)


def _empty_and_distribution(
    func: Any, named: dict[str, Any]
) -> tuple[torch.Tensor, Distribution] | None:
    """Return what a factory makes, not filled yet, and by what it fills it; None: not known."""
    make = _MADE.get(func._schema.name.removeprefix("aten::"))
    if make is None or named.get("out") is not None:
        return None
    dtype = named.get("dtype")
    if not isinstance(dtype, torch.dtype):  # a schema has its defaults as numbers
        dtype = torch.int64 if "high" in named else None
    # Made empty, then filled: torch's own factory would draw it as if it were all.
    made = torch.empty(named["size"], dtype=dtype, device=named.get("device"))
    parameters = ("low", "high", "mean", "std")
    return made, make(**{name: named[name] for name in parameters if name in named})


def _target(named: dict[str, Any]) -> torch.Tensor | None:
    """Return the tensor that says what is drawn: the first one that is read or filled."""
    # By the order of the schema: `self` first, or the first parameter of a distribution.
    tensors = (x for name, x in named.items() if name != "out" and isinstance(x, torch.Tensor))
    return next(tensors, None)


def _is_one_number(named: dict[str, Any]) -> bool:
    """Tell whether a factory makes a tensor without dims, which has no rows."""
    size = named.get("size")
    return size is not None and len(size) == 0


def _has_generator(named: dict[str, Any]) -> bool:
    return named.get("generator") is not None


def _is_one_row(name: str, target: torch.Tensor) -> bool:
    return name == "multinomial.default" and target.ndim == 1


def _name(func: Any) -> str:
    return f"{func._schema.name.partition('::')[2]}.{func._overloadname}"


def _said(named: dict[str, Any], target: torch.Tensor | None) -> str:
    if target is None:
        return f"a new tensor of size {named.get('size', named.get('n'))}"
    kind = type(target).__name__ if isinstance(target, DTensor) else "plain tensor"
    return f"a {kind} of shape {tuple(target.shape)}"


def _unsaid(op: Any, what: str) -> LayoutError:
    return LayoutError(
        f"{op} draws {what} inside of consistent(), on one of several ranks. Whether that is a "
        "part of the batch, as under FSDP2 and DDP, or the same everywhere cannot be known. Write "
        'consistent(data=mesh["dp"]) with the axis (or axes) over which the batch is divided, or '
        "consistent(data=None) where none is"
    )


def _of_a_shard(op: Any, what: str) -> LayoutError:
    return LayoutError(
        f"{op} draws {what} that was computed of a DTensor's local shard: which part of one "
        "device's tensor it is, nothing in it says. Keep it a DTensor where it is drawn: "
        "`use_local_output=False` in ColwiseParallel, SequenceParallel or PrepareModuleOutput, "
        "and no `to_local()` before"
    )


def _not_by_rows(op: Any, what: str) -> LayoutError:
    attention = ", or choose sdpa_kernel(SDPBackend.MATH)" if "attention" in str(op) else ""
    return LayoutError(
        f"{op} of a part of the batch, {what}: how many numbers each row takes is not known here, "
        "so the rows of one rank cannot be drawn alone. Draw it of the whole batch under "
        f"consistent(data=None), or use another op{attention}"
    )


def _unknown_factory(op: Any, what: str) -> LayoutError:
    return LayoutError(
        f"{op} makes {what} inside of consistent(data=...): whether its rows are rows of this "
        "rank's batch, or every rank shall have the same, cannot be known. Write "
        'consistent(data=..., factories="rows") or factories="whole", draw it like an activation '
        "(torch.rand_like), or under a nested consistent(data=None)"
    )


def _default_generator(tensor: torch.Tensor) -> torch.Generator:
    if tensor.device.type != "cuda" or policy() != "native":
        return torch.default_generator
    generator: torch.Generator = torch.cuda.default_generators[tensor.device.index]
    return generator
