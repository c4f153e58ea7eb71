"""The graph of a program while it is recorded: which node made which tensor, and what is free.

Tensors are known by identity. What a step uses was made by a step, is an argument, or existed
before. The last kind is *free*: it becomes an argument of the program too, and is read anew at
every replay (a parameter's local tensor, say, from the parameter).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.parameter import is_lazy

from vescale_dtensor._autograd.leaf_gradient import LeafGradient
from vescale_dtensor._capture.guard.call_key import cached_uses
from vescale_dtensor._capture.guard.free_tensors import OutsideTensors, gradient_state, state_of
from vescale_dtensor._capture.record.step_arguments import extras_of, items_of, made_inside, remade
from vescale_dtensor._capture.record.unsupported import OF_FUNCTION, refusal
from vescale_dtensor._capture.record.wrapper_snapshot import WrapperSnapshot
from vescale_dtensor._layout.notation import short_dtype
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._torch.compat import storage_identity

_PYTHON: tuple[type, ...] = (bool, int, float, complex, str, type(None), type(...))
_TORCH: tuple[type, ...] = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_TEXT = frozenset({str})
# What fx can print as code. Exact types: a subclass may compare or print as it likes.
_WRITTEN_OUT = frozenset(_PYTHON + _TORCH)

Fetch = Callable[[list[Any]], Any]
"""How a replay gets an argument of the program, from the flat arguments of the call."""


@dataclass
class _Known:
    """A tensor that a node made."""

    # Weak: a recording must not keep all intermediate tensors alive. Once this one is freed another
    # may get its id, which a dead reference tells.
    tensor: weakref.ref[Tensor]
    node: fx.Node
    # What `_history` gave after the last recorded step that had the tensor.
    history: object


@dataclass(frozen=True)
class InputSource:
    """Where an argument of a program comes from.

    Attributes:
        fetch: reads it at a replay.
        name: of it, in the program.
        holder: of a free tensor, the object that it is read from: a DTensor, or the tensor itself.
        index: of the argument, if it is one.
        states: of the holder, when it was met: see `FreeTensors`.
    """

    fetch: Fetch
    name: str
    holder: Tensor | None = None
    index: int | None = None
    states: tuple[Any, Any] = (None, None)


@dataclass
class LeafUse:
    """The uses of one leaf from outside.

    Attributes:
        wrapper: its DTensor; of an argument, the one that was recorded.
        source: where it comes from.
        varying: the axes on which any use varies.
        node: of its gradient state, where the program needs that.
    """

    wrapper: DTensor
    source: InputSource
    varying: int = 0
    node: fx.Node | None = None


class TracedGraph:
    """The graph, and the tensors it knows.

    Args:
        outside: the tensors from outside.
        met: whether a Python object is from outside.
    """

    def __init__(self, outside: OutsideTensors, met: Callable[[Any], bool]) -> None:
        self.graph = fx.Graph()
        self.outside = outside
        self.met = met
        self.sources: dict[fx.Node, InputSource] = {}
        self.constants: dict[str, object] = {}
        # Of arguments: the version when the recording met them, so that writes to them show at its
        # end. Weak, like all that knows tensors of one run.
        self.versions: dict[fx.Node, tuple[weakref.ref[Tensor], int]] = {}
        # Storages that steps say they write to. Those of arguments live as long as the recording.
        self.written: set[int] = set()
        # By id, as constants may have no hash, or an `==` of their own.
        self._constant_nodes: dict[int, fx.Node] = {}
        self._known: dict[int, _Known] = {}
        # By id, with the tensor itself: held, so that no other gets its id.
        self._cached_uses: dict[int, tuple[Tensor, InputSource]] = {}
        self.snapshot = WrapperSnapshot()
        self.uses: dict[LeafGradient, LeafUse] = {}
        self.dropped_gradients: set[LeafGradient] = set()
        self._made_leaves: dict[LeafGradient, fx.Node] = {}
        self._wrappers: list[tuple[DTensor, InputSource]] = []
        # Arguments are found as the recording goes on, and fx wants them before all steps.
        self._last_argument: fx.Node | None = None

    # --- what comes in

    def add_argument(self, value: Tensor, index: int) -> None:
        """Make a tensor among the arguments of the call one of the program."""
        name = f"argument_{index}"
        if not isinstance(value, DTensor):
            self._enter(value, InputSource(lambda flat: flat[index], name, index=index))
            return
        # Before any step: a step may leave caches on the wrapper.
        self.snapshot.add_argument(value)
        source = InputSource(lambda flat: flat[index]._local_tensor, name, index=index)
        self._enter(value._local_tensor, source)
        self._wrappers.append((value, source))
        self._add_cached_uses(value, index, itemgetter(index), name)

    def _add_cached_uses(self, wrapper: DTensor, index: int, fetch: Fetch, name: str) -> None:
        """Know what earlier uses left on an argument: where it is used, the program takes it."""
        aliases, result = cached_uses(wrapper)
        for mask, alias in aliases.known.items() if aliases is not None else ():
            self._cached_uses[id(alias)] = alias, _alias_source(fetch, mask, name, index)
        if result is not None:
            local = result._local_tensor

            # Of the wrapper of each call: the key of a call says that it has one, in which layout.
            def remembered(flat: list[Any]) -> Any:
                return fetch(flat)._cached_redistribution.result

            source = InputSource(
                lambda flat: remembered(flat)._local_tensor,
                f"{name}_cached_redistribution",
                index=index,
            )
            self._cached_uses[id(local)] = local, source
            self._add_cached_uses(result, index, remembered, f"{name}_cached_redistribution")

    def _enter(self, tensor: Tensor, source: InputSource) -> fx.Node:
        """Make a tensor an argument of the program; returns its node."""
        if self.has_node(tensor):
            return self._known[id(tensor)].node  # passed twice: guarded as such
        node = self.placeholder(source)
        self.set_node(tensor, node)
        if tensor.layout is torch.strided:
            node.meta["memory"] = storage_identity(tensor), tensor.stride()
        # Tensors of inference mode count no versions; `written` has what steps say of them.
        if not tensor.is_inference():
            self.versions[node] = weakref.ref(tensor), tensor._version
        return node

    def placeholder(self, source: InputSource) -> fx.Node:
        """Add an argument to the graph, after those that it has."""
        last = self._last_argument
        place = self.graph.inserting_after(last) if last else self.graph.inserting_before()
        with place:
            node = self.graph.placeholder(source.name)
        self._last_argument = node
        self.sources[node] = source
        return node

    def _add_free_tensor(self, tensor: Tensor) -> fx.Node:
        """A tensor from outside."""
        if is_lazy(tensor):  # which has neither a shape nor data, and torch's words mislead here
            raise refusal(
                "a parameter or buffer of a lazy module is used before it is initialized. Call "
                "the function itself once, outside of capture"
            )
        # Backward frees what a history saved, so the second replay would fail in it.
        if tensor.requires_grad and not tensor.is_leaf:
            raise refusal(
                f"{_described(tensor)} comes from outside and has a history that gradients would "
                "flow back through, which one call can do only once. Call detach(), or pass the "
                "tensor as an argument"
            )
        wrapper = self.outside.wrapper_of(tensor)
        name = f"free_{len(self.sources)}"
        if wrapper is None:
            # Taken here, where the recording first meets it: later, the program may have changed
            # it.
            states = state_of(tensor), gradient_state(tensor)
            return self._enter(
                tensor, InputSource(lambda _: tensor, name, holder=tensor, states=states)
            )
        holder = wrapper  # which the lambda below must not see as None
        states = state_of(holder), gradient_state(holder)
        # The local tensor is read anew at each replay: `.data = ` and optimizers may replace it.
        source = InputSource(lambda _: holder._local_tensor, name, holder=holder, states=states)
        self._wrappers.append((holder, source))
        return self._enter(tensor, source)

    def was_written(self, node: fx.Node) -> bool:
        """Whether the tensor that an argument of the program is has been written to."""
        memory = node.meta.get("memory")
        if memory is not None and memory[0] in self.written:
            return True
        known = self.versions.get(node)
        tensor = known[0]() if known is not None else None
        return known is not None and tensor is not None and tensor._version != known[1]

    def has_new_history(self, node: fx.Node) -> bool:
        """Whether what an argument of the program is was given an autograd history."""
        known = self.versions.get(node)
        tensor = known[0]() if known is not None else None
        if tensor is None or not self.was_written(node):
            return False
        return tensor.requires_grad and not tensor.is_leaf

    # --- tensors and nodes

    def set_node(self, tensor: Tensor, node: fx.Node) -> None:
        """Remember which node made a tensor."""
        self._known[id(tensor)] = _Known(weakref.ref(tensor), node, _history(tensor))

    def has_node(self, tensor: Tensor) -> bool:
        """Whether a node made it."""
        found = self._known.get(id(tensor))
        return found is not None and found.tensor() is tensor

    def known_node(self, tensor: Tensor) -> fx.Node | None:
        """The node that made a tensor, if one did."""
        return self._known[id(tensor)].node if self.has_node(tensor) else None

    def changed(self, tensor: Tensor) -> None:
        """A recorded step may have given this tensor another history."""
        if self.has_node(tensor):
            self._known[id(tensor)].history = _history(tensor)

    def changed_in_memory(self, written: Iterable[Tensor]) -> None:
        """A recorded step has written to these: what are views of the same got other histories."""
        roots = [tensor if tensor._base is None else tensor._base for tensor in written]
        for known in self._known.values():
            tensor = known.tensor()
            if tensor is not None and any(tensor is r or tensor._base is r for r in roots):
                known.history = _history(tensor)

    def node_of(self, tensor: Tensor) -> fx.Node:
        """The node that made a tensor.

        Raises:
            CaptureError: it was made, or got its gradient, behind the recording's back.
        """
        if self.has_node(tensor):
            found = self._known[id(tensor)]
            # Tensors are changed in place, also by nodes that no mode sees: such a tensor has a
            # node that the program would not make.
            if found.history != _history(tensor):
                raise refusal(OF_FUNCTION)
            return found.node
        # Asked before `outside`: what is left on an argument is read from the argument of each
        # call.
        aside = self._cached_uses.get(id(tensor))
        if aside is not None and aside[0] is tensor:
            return self._enter(tensor, aside[1])
        # Neither made by a step nor met before: used as a constant, it would be this call's
        # forever.
        if tensor not in self.outside:
            raise refusal(
                f"{_described(tensor)} was made by something that torch's overrides do not see: "
                "torch.from_numpy, a C++ extension, a custom autograd.Function, a torch.func "
                "transform. Make it a torch.library.custom_op, or pass the tensor as an argument"
            )
        return self._add_free_tensor(tensor)

    def check_histories(self) -> None:
        """Ask whether writes have given arguments the histories that the program gives them.

        Raises:
            CaptureError: a custom Function wrote to one, and nothing has used it since. To a
                DTensor none can: autograd takes every wrapper for a leaf.
        """
        for node, (reference, _) in self.versions.items():
            tensor = reference()
            if tensor is not None and self.was_written(node):
                self.node_of(tensor)

    def meet(self, wrapper: DTensor) -> None:
        """See a DTensor in a call of the function."""
        # A wrapper that the function made is its own affair: nothing of it outlives the call.
        if wrapper in self.outside:
            self.outside.prefer(wrapper)
            self.snapshot.add_free_tensor(wrapper)

    def note_leaves(self) -> None:
        """Note how leaves from outside were used, also where the fast path says nothing of it.

        All of a leaf's uses, in this recording and before, are in its `partial`; noting more of
        them than the program has is right as well.
        """
        for wrapper, _ in self._wrappers:
            leaf = wrapper._leaf_gradient
            # Another local tensor is another leaf: what this one notes is void then.
            if leaf is not None and leaf.local is wrapper._local_tensor:
                self.leaf_used(leaf, leaf.partial)

    def leaf_used(self, leaf: LeafGradient, varying: int) -> bool:
        """Note a use of a leaf, which varies on these axes; False if the leaf was made inside."""
        use = self._use_of(leaf)
        if use is not None:
            # All uses together: where one varies, the gradient is partial whatever the others do.
            use.varying |= varying
        return use is not None

    def _use_of(self, leaf: LeafGradient) -> LeafUse | None:
        """The uses of a leaf from outside; None if the leaf was made inside."""
        if leaf not in self.uses:
            for wrapper, source in self._wrappers:
                if wrapper._leaf_gradient is leaf:
                    self.uses[leaf] = LeafUse(wrapper, source)
                    break
        return self.uses.get(leaf)

    def leaf_node(self, leaf: LeafGradient) -> fx.Node:
        """The gradient state of a leaf: of an argument, of a free tensor, or made inside."""
        use = self._use_of(leaf)
        if use is None:
            return self._made_leaf(leaf)
        if use.node is None:
            index = use.source.index
            # The state of a free leaf is guarded to stay this object (`LeafUses`); that of an
            # argument comes with each call.
            use.node = self.constant(leaf) if index is None else self._leaf_of_argument(index)
        return use.node

    def _leaf_of_argument(self, index: int) -> fx.Node:
        """The gradient state of the leaf that is this argument in each call."""
        from vescale_dtensor._autograd.local_use import leaf_gradient_of

        name = f"argument_{index}_leaf_gradient"
        return self.placeholder(
            InputSource(lambda flat: leaf_gradient_of(flat[index]), name, index=index)
        )

    def _made_leaf(self, leaf: LeafGradient) -> fx.Node:
        """The gradient state of a leaf that the function itself made: a step of the program."""
        if leaf not in self._made_leaves:
            arguments = self.node_of(leaf.local), self.constant(leaf.layout)
            self._made_leaves[leaf] = self.graph.call_function(LeafGradient, arguments)
        return self._made_leaves[leaf]

    def use_at(self, node: fx.Node) -> LeafUse | None:
        """The leaf from outside whose gradient state a node is."""
        return next((use for use in self.uses.values() if use.node is node), None)

    # --- arguments of steps

    def argument(self, value: Any) -> Any:
        """An argument of a call as one of a node: tensors are nodes, odd objects are constants."""
        kind = type(value)
        if isinstance(value, Tensor):
            return self.node_of(value)
        if kind in _WRITTEN_OUT:
            return value
        if kind is tuple or kind is torch.Size:
            return tuple(map(self.argument, value))
        if kind is list:
            return list(map(self.argument, value))
        if kind is dict and _TEXT.issuperset(map(type, value)):
            return dict(zip(value, map(self.argument, value.values()), strict=True))
        if isinstance(value, list | tuple | dict):
            return self._remade(value)
        if kind is slice:
            return slice(*(self.argument(v) for v in (value.start, value.stop, value.step)))
        if kind is LeafGradient:
            return self.leaf_node(value)
        return self.constant(value)

    def _remade(self, value: Any) -> fx.Node:
        """The node of a named tuple, or of another container of a class of its own."""
        # Not a constant, even without tensors: the step may be given a new one in each call.
        items = [self.argument(item) for item in items_of(value)]
        extras = {name: self.argument(item) for name, item in extras_of(value).items()}
        return self.graph.call_function(remade, (self.constant(type(value)), items, extras))

    def constant(self, value: object, check: bool = True) -> fx.Node:
        """The node of an object that the program keeps.

        Raises:
            CaptureError: it holds what belongs to this call.
        """
        known = self._constant_nodes.get(id(value))
        if known is None:
            # Tensors that earlier steps made are this call's; later calls would go on with them.
            inside = check and made_inside(value, self.outside.__contains__, self.met)
            if inside:
                raise refusal(
                    f"a {type(value).__name__} that is given to a torch function (a gradient hook, "
                    f"say) holds {inside} that the function makes, of which replays would keep the "
                    "first. Write the values into a tensor from outside (copy_), and let it hold "
                    "that one"
                )
            name = f"{type(value).__name__.lower().strip('_')}_{len(self.constants)}"
            self.constants[name] = value  # which keeps it alive, and its id its own
            known = self._constant_nodes[id(value)] = self.graph.get_attr(name)
        return known


def _history(tensor: Tensor) -> object:
    # The name of the node: holding the node would keep its graph alive.
    try:
        node = tensor.grad_fn
    except RuntimeError:
        # torch tells none of a view that was made under no_grad, once its base was written to.
        node = None
    return tensor.requires_grad, None if node is None else node.name()


def _described(tensor: Tensor) -> str:
    """A tensor in words, for messages."""
    return f"a tensor {short_dtype(tensor.dtype)}{list(tensor.shape)}"


def _alias_source(fetch: Fetch, mask: int, name: str, index: int) -> InputSource:
    """How a replay gets an alias that an earlier use left on an argument."""

    def alias(flat: list[Any]) -> Tensor:
        aliases = fetch(flat)._use_aliases
        # `known` written out: it is asked of each parameter that a layer above gathers.
        by_mask: dict[int, Tensor] = aliases.by_mask
        return by_mask[mask] if mask in by_mask else aliases.apart[mask]

    return InputSource(alias, f"{name}_alias", index=index)
