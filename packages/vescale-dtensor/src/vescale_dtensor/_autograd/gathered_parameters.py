"""Parameters that are stored as shards and used whole: what a layer above needs to gather them.

Such a layer keeps a parameter as a sharded leaf, gathers its values before they are used, and lets
modules compute with a DTensor of the gathered values. The gradient then comes back unsummed, so
that one reduce-scatter of many parameters can both add it up and shard it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor._autograd.hooks import hooked_node
from vescale_dtensor._autograd.local_use import join_hidden_node, leaf_gradient_of
from vescale_dtensor._autograd.uses import CotangentReduction, UseAliases, fork_uses, use_masks
from vescale_dtensor._errors import DTensorError, LayoutError
from vescale_dtensor._layout.layout import ById, Layout, normalized
from vescale_dtensor._layout.local_shards import local_shape
from vescale_dtensor._layout.placements import Partial
from vescale_dtensor._layout.spec import Spec, spec_of
from vescale_dtensor._tensor.dtensor import DTensor, wrap, wrap_each
from vescale_dtensor._torch.worlds import cached


def keep_alive(parameter: Tensor, value: object) -> None:
    """Let a value live as long as a parameter does; copies of the parameter do not hold it.

    For what decides which collectives a use of the parameter takes: whether Python has freed that,
    while the parameter lives, is chance on each rank.

    Args:
        parameter: a leaf DTensor.
        value: what to keep. It may refer to the parameter.

    Raises:
        DTensorError: the parameter is no leaf DTensor.
    """
    if not isinstance(parameter, DTensor) or not parameter._local_tensor.is_leaf:
        raise DTensorError(f"keep_alive: {parameter!r} is not a leaf DTensor")
    leaf_gradient_of(parameter)
    holds = parameter._leaf_holds
    if all(one is not value for one in holds.others):
        holds.others = (*holds.others, value)


def local_leaf(parameter: Tensor) -> Tensor:
    """The local tensor of a leaf, to which torch accumulates this rank's gradient.

    Unlike `to_local` it records no use: an `autograd.Function` that takes it has to return a
    gradient of the local shape, complete on the mesh axes that shard the parameter and not yet
    summed over those that `gathered` found it replicated on.

    Raises:
        DTensorError: the tensor is no leaf.
    """
    # By its type first, which is no call: this is asked of each tensor that autograd saves.
    given: Any = parameter
    known = type(given) is DTensor or isinstance(given, DTensor)
    if not known or not given._local_tensor.is_leaf:
        raise _no_leaf("local_leaf", parameter)
    local: Tensor = given._local_tensor
    return local


def local_leaves(parameters: Iterable[Tensor]) -> list[Tensor]:
    """`local_leaf` of each, at the cost of one."""
    # Without a call for each: layers that gather ask for all parameters several times a step.
    given: list[Any] = parameters if isinstance(parameters, list) else list(parameters)
    found: list[Tensor] = [
        one._local_tensor for one in given if type(one) is DTensor and one._local_tensor.is_leaf
    ]
    if len(found) == len(given):
        return found
    for one in given:
        if not isinstance(one, DTensor) or not one._local_tensor.is_leaf:
            raise _no_leaf("local_leaves", one)
    return [one._local_tensor for one in given]


def _no_leaf(function: str, given: Any) -> DTensorError:
    # Without its values: a parameter of a model prints pages of numbers.
    what = f"a {type(given).__name__} of shape {tuple(given.shape)}"
    return DTensorError(
        f"{function}: {what} is not a leaf DTensor. A parameter that came after a model was "
        "distributed has to be distributed as well: distribute_tensor(...), or write its values "
        "into the one that was there."
    )


def written_unseen(parameter: Tensor) -> bool:
    """Whether the local tensor was handed out, so that writes may miss its version counter.

    `to_local()`, `.data` and `.data = value` do so. The same answer on every rank.
    """
    return isinstance(parameter, DTensor) and parameter._local_escaped


def gathered(
    parameter: DTensor, whole: Tensor, device_mesh: DeviceMesh, placements: Sequence[object]
) -> DTensor:
    """Return a DTensor of a parameter's gathered values; its gradient reaches `whole` unsummed.

    Uses of the result may vary or not on any axis where `placements` replicates; what arrives at
    `whole` is this rank's contribution on all of these. From now on the gradient of `parameter` is
    partial on the axes where it is replicated itself. No communication, in neither direction.

    Args:
        parameter: the stored leaf; its mesh may order the axes otherwise.
        whole: this rank's local tensor of the gathered values, with its autograd history.
        device_mesh: mesh of the result, as that of the tensors that it meets.
        placements: one per axis of that mesh; none may be partial.

    Raises:
        LayoutError: a partial placement, or a `whole` of another shape than they give this rank.
    """
    shape = tuple(parameter.shape)
    spec, expected = _gathered_spec(ById(device_mesh), tuple(placements), shape, whole.dtype)
    layout = spec.layout
    if tuple(whole.shape) != expected:
        raise LayoutError(
            f"gathered: {layout} of global shape {shape} gives this rank the shape {expected}, "
            f"found {tuple(whole.shape)}"
        )
    if not (torch.is_grad_enabled() and whole.requires_grad):
        return wrap(whole.detach(), spec)
    leaf_gradient_of(parameter).note_use(parameter._spec.layout.replicated)
    if not layout.replicated:
        return wrap(whole, spec)
    # All uses are aliases of one node, also those that vary nowhere: it alone can tell which
    # cotangents are complete, and keeps them on one coordinate.
    masks, reduction = _unsummed(layout)
    aliases = fork_uses(whole, whole, masks, reduction, shape)
    result = wrap(aliases[0], spec)
    result._use_aliases = UseAliases(aliases[0], dict(zip(masks, aliases, strict=True)))
    return result


class Gathering:
    """`gathered` for many parameters whose values one `autograd.Function` returns.

    That Function returns `aliases` and hands what arrives to `contributions`, so that no parameter
    has a node of its own; `wrapped` makes DTensors of its outputs. With `ctx.stands_for_leaves`
    set, writes to these that autograd would record are refused, as they are to a leaf.

    Args:
        parameters: the stored leaves.
        device_mesh: mesh of the results.
        placements: for each parameter, one per axis of that mesh; none may be partial.

    Raises:
        DTensorError: a parameter is no leaf DTensor.
        LayoutError: a placement is partial, or does not fit the shape.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        device_mesh: DeviceMesh,
        placements: Sequence[Sequence[object]],
    ) -> None:
        local_leaves(parameters)
        self._parameters: list[Any] = list(parameters)
        self._mesh = ById(device_mesh)
        self._placements = [tuple(each) for each in placements]
        self._uses = [self._use(at, one.dtype) for at, one in enumerate(self._parameters)]
        # Without `requires_grad`, which may change: whose outputs have several aliases does not.
        self._counts = [len(one.masks) for one in self._uses]
        self._are_pairs = all(count == 2 for count in self._counts)
        self._starts = list(accumulate(self._counts, initial=0))

    def _use(self, at: int, dtype: torch.dtype) -> _WholeUse:
        parameter = self._parameters[at]
        shape = tuple(parameter.shape)
        spec, expected = _gathered_spec(self._mesh, self._placements[at], shape, dtype)
        masks, reduction = _unsummed(spec.layout) if spec.layout.replicated else ((0,), None)
        return _WholeUse(dtype, spec, expected, masks, reduction)

    def aliases(self, wholes: Sequence[Tensor]) -> list[Tensor]:
        """What the Function returns for these values, of which none has a history.

        Raises:
            LayoutError: values of another shape than the placements give this rank.
        """
        found = []
        for at, (use, whole) in enumerate(zip(self._uses, wholes, strict=True)):
            if whole.dtype is not use.dtype:  # the first time, and after a change of the model's
                use = self._uses[at] = self._use(at, whole.dtype)
            if whole.shape != use.local_shape:
                raise LayoutError(
                    f"gathered: {use.spec.layout} of global shape {tuple(use.spec.shape)} gives "
                    f"this rank the shape {use.local_shape}, found {tuple(whole.shape)}"
                )
            for _ in use.masks:
                # Never views: see `uses.SharedUseNode`.
                found.append(whole.detach())
        return found

    def frozen(self) -> list[int]:
        """The numbers of those among the aliases that no gradient reaches."""
        found: list[int] = []
        start = 0
        for parameter, count in zip(self._parameters, self._counts, strict=True):
            if not parameter._local_tensor.requires_grad:
                found += range(start, start + count)
            start += count
        return found

    def contributions(self, cotangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """For each parameter, this rank's contribution to the gradient of its whole values.

        Args:
            cotangents: of the aliases, in their order; None for one without uses.
        """
        varying = cotangents[1::2]
        # Mostly each has two aliases, and nothing has arrived at the first.
        if self._are_pairs and all(map(is_, cotangents[::2], repeat(None))):
            return list(varying)
        found: list[Tensor | None] = []
        start = 0
        for use, count in zip(self._uses, self._counts, strict=True):
            end = start + count
            # Mostly all uses vary on all axes, and there is nothing to add or to mask.
            if use.reduction is None or (count == 2 and cotangents[start] is None):
                found.append(cotangents[end - 1])
            else:
                given = tuple(cotangents[start:end])
                found.append(use.reduction.reduce(use.masks, given, use.spec.shape))
            start = end
        return found

    def wrapped(
        self, aliases: Sequence[Tensor], data_uses: list[Any] | None = None
    ) -> list[DTensor]:
        """DTensors of what the Function has returned, and note their uses.

        As with `gathered`, gradients of the parameters are partial from now on where these are
        replicated themselves.

        Args:
            aliases: what the Function has returned.
            data_uses: whenever `.data` of a result is used, its `id` is appended, with the tensor
                that was handed out, whose version counts what is written to it, or None where
                `.data` was assigned: what the version of the result does not tell.
        """
        starts, uses = self._starts, self._uses
        found = wrap_each([aliases[start] for start in starts[:-1]], [u.spec for u in uses])
        for at, result in enumerate(found):
            result._data_uses = data_uses
            local: Tensor = result._local_tensor
            if local.requires_grad:
                parameter, use = self._parameters[at], uses[at]
                leaf = parameter._leaf_gradient
                # Noted once: what is partial stays so, for as long as the leaf is the same.
                known = leaf is not None and leaf.local is parameter._local_tensor
                if not known or parameter._spec.layout.replicated & ~leaf.partial:
                    _note_partial(parameter)
                if use.reduction is not None:
                    own = aliases[starts[at] : starts[at + 1]]
                    result._use_aliases = _GatheredAliases(
                        local, dict(zip(use.masks, own, strict=True))
                    )
        return found

    @staticmethod
    def watch_data(results: Sequence[Any], data_uses: list[Any]) -> None:
        """Append to `data_uses` for these tensors, too: see `wrapped`."""
        for result in results:
            result._data_uses = data_uses

    @staticmethod
    def values(result: Tensor) -> Tensor:
        """The local tensor of one of the results, wherever `.data` or `set_` have moved it."""
        return result._local_tensor if isinstance(result, DTensor) else result

    def note_plain_uses(self) -> None:
        """Note uses of the local leaves themselves as plain tensors, as `wrapped` notes its own.

        For a mesh of one rank, whose local tensors are whole: what is computed from them is what
        DTensors would compute. Elsewhere uses of them count as varying on every axis.
        """
        for parameter in self._parameters:
            local, leaf = parameter._local_tensor, parameter._leaf_gradient
            # Without a call where it is noted already, as in each step but the first.
            is_new = leaf is None or leaf.local is not local
            new = is_new or parameter._spec.layout.replicated & ~leaf.partial
            if local.requires_grad and new:
                _note_partial(parameter)


class _GatheredAliases(UseAliases):
    """Aliases that a write leaves as they are: it is none that autograd records, as to a leaf."""

    __slots__ = ()

    def is_current(self, local: Tensor) -> bool:
        """Whether `local` is the tensor these alias."""
        return self.local is local


@dataclass(frozen=True, slots=True)
class _WholeUse:
    """How the gathered values of one parameter are used.

    Attributes:
        dtype: of the values.
        spec: of their DTensor.
        local_shape: what this rank has of them.
        masks: the varying axes of each alias, all of them last where there are two.
        reduction: adds up what arrives; None where no axis replicates.
    """

    dtype: torch.dtype
    spec: Spec
    local_shape: tuple[int, ...]
    masks: tuple[int, ...]
    reduction: CotangentReduction | None


def _note_partial(parameter: Any) -> None:
    leaf_gradient_of(parameter).note_use(parameter._spec.layout.replicated)


# Asked for every parameter at every step. A mesh is of one rank, so its part follows from the key.
@cached(4096)
def _gathered_spec(
    mesh: ById, placements: tuple[object, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[Spec, tuple[int, ...]]:
    """The spec of gathered values, and the shape of this rank's part.

    Raises:
        LayoutError: a placement is partial, or does not fit the shape.
    """
    layout = Layout.of(mesh.mesh, normalized(placements, len(shape)))
    if any(isinstance(one, Partial) for one in layout.placements):
        raise LayoutError(f"gathered: values in the layout {layout} are not whole")
    return spec_of(layout, shape, dtype), tuple(local_shape(layout, shape))


@cached(1024)
def _unsummed(layout: Layout) -> tuple[tuple[int, ...], CotangentReduction]:
    """Masks of the aliases of a gathered tensor, and a backward that leaves their sum partial."""
    return use_masks(layout), CotangentReduction(layout, layout.replicated, layout)


def before_backward(tensor: Tensor, call: Callable[[], None]) -> Any:
    """Call a function as soon as backward reaches what made a tensor, whichever use led there.

    Unlike a tensor hook it sees no gradient, so nothing has to be completed for it.

    Args:
        tensor: a DTensor or a plain tensor, no leaf.
        call: without arguments.

    Returns:
        A handle with `remove()`.

    Raises:
        RuntimeError: backward does not reach the tensor: it has no history.
    """
    if isinstance(tensor, DTensor):
        join_hidden_node(tensor)
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if local.grad_fn is None:
        raise RuntimeError("before_backward: backward does not reach a tensor without a history")
    reached = _ReachHook(call)
    handle = hooked_node(local, reached.at_view)
    base = local._base if local._is_view() else None
    if base is not None and base.grad_fn is not None and base.grad_fn is not local.grad_fn:
        handle = _Handles(handle, base.grad_fn.register_prehook(reached.at_base))
    return handle


class _ReachHook:
    """Calls a function once as backward comes by a view to its base.

    A write to a view in place gives it another node, and backward goes to that of the base past the
    former: `y = linear(x); y += x`, for example, whose product has a view for a result.
    """

    __slots__ = ("_call", "_was_at_view")

    def __init__(self, call: Callable[[], None]) -> None:
        self._call, self._was_at_view = call, False

    def at_view(self, _: Any) -> None:
        """Backward is at the node of the tensor itself."""
        self._was_at_view = True
        self._call()

    def at_base(self, _: Any) -> None:
        """Backward is at the node of what the tensor was a view of."""
        was_at_view, self._was_at_view = self._was_at_view, False
        if not was_at_view:
            self._call()


class _Handles:
    """Handles of hooks that are removed together."""

    def __init__(self, *handles: Any) -> None:
        self._handles = handles

    def remove(self) -> None:
        """Remove them."""
        for handle in self._handles:
            handle.remove()
