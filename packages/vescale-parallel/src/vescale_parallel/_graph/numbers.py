"""Numbers that a graph takes at each call, as tensors: a compiler would compile anew for each one.

Learning rates and corrections of optimizers are such. Operators take a tensor of no dims in place
of a number of Python, or what was multiplied by it. AdamW's update of float32 keeps its bits; what
is scaled by `alpha=`, as SGD's update and decay of gradients are, and products of narrower dtypes
may round otherwise, as compiled code does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import fx, nn

from vescale_parallel._graph.values import fake_mode_of, say_value

aten: Any = torch.ops.aten

_FACTORS: Final = {aten.add.Tensor, aten.add_.Tensor, aten.sub.Tensor, aten.sub_.Tensor} | {
    *(aten.addcmul.default, aten.addcmul_.default, aten.addcdiv.default, aten.addcdiv_.default)
}
"""What scales its second argument by `alpha=` or `value=`."""
_OTHERS: Final = _FACTORS | {aten.mul.Tensor, aten.mul_.Tensor, aten.div.Tensor, aten.div_.Tensor}
"""What takes a tensor or a number for its second argument."""
_LERPS: Final = {aten.lerp.Scalar: aten.lerp.Tensor, aten.lerp_.Scalar: aten.lerp_.Tensor}


def takers_of_numbers(graph: fx.Graph) -> frozenset[fx.Node]:
    """Nodes that can be given no tensor in place of a number that the graph takes."""
    return frozenset(u for n in _numbers(graph) for u in n.users if _way(u, n) is None)


def with_tensors(module: fx.GraphModule) -> tuple[int, ...]:
    """Let a graph take tensors in place of numbers, in place.

    Returns:
        Positions of these among its arguments.
    """
    graph = module.graph
    make = _Maker(graph)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    numbers = _numbers(graph)
    for number in numbers:
        number.meta["val"] = make.number()
        for user in list(number.users):
            way = _way(user, number)
            assert way is not None
            way(make, user, number)
    graph.lint()
    module.recompile()
    return tuple(inputs.index(one) for one in numbers)


class TakingNumbers(nn.Module):
    """Calls a module with tensors in place of numbers.

    Args:
        call: the module.
        places: of numbers among its arguments.
    """

    def __init__(self, call: Callable[..., Any], places: Sequence[int]) -> None:
        super().__init__()
        self.call, self._places = call, places

    def forward(self, *args: Any) -> Any:
        """Return what the module does."""
        given = list(args)
        for at in self._places:
            given[at] = torch.tensor(given[at], dtype=torch.float64, device="cpu")
        return self.call(*given)


def _numbers(graph: fx.Graph) -> list[fx.Node]:
    inputs = (node for node in graph.nodes if node.op == "placeholder")
    return [node for node in inputs if isinstance(node.meta.get("val"), int | float)]


class _Maker:
    """Adds nodes that say what they make."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph, self._mode = graph, fake_mode_of(graph)

    def number(self) -> Any:
        with self._mode:
            return torch.empty((), dtype=torch.float64, device="cpu")

    def __call__(self, user: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a node in front of another one, with its label."""
        with self._graph.inserting_before(user):
            node = self._graph.call_function(target, args, kwargs)
        say_value(node, self._mode)
        if "label" in user.meta:
            node.meta["label"] = user.meta["label"]
        return node


def _way(user: fx.Node, number: fx.Node) -> Callable[[_Maker, fx.Node, fx.Node], None] | None:
    """How a node can take a tensor in place of a number; None: it cannot."""
    places = [at for at, value in enumerate(user.args) if value is number]
    named = [name for name, value in user.kwargs.items() if value is number]
    if user.target in _LERPS and places == [2] and not named:
        return _lerp
    if user.target in _OTHERS and places == [1] and not user.kwargs:
        return _other
    if user.target in _FACTORS and not places and named in (["alpha"], ["value"]):
        return _factor
    return None


def _lerp(make: _Maker, user: fx.Node, number: fx.Node) -> None:
    start, end, _ = user.args
    user.target = _LERPS[user.target]
    user.args = (start, end, _as_of(make, user, number, start.meta["val"]))  # type: ignore[union-attr]


def _other(make: _Maker, user: fx.Node, number: fx.Node) -> None:
    user.args = (user.args[0], _as_operand(make, user, number, user.args[0]))


def _factor(make: _Maker, user: fx.Node, number: fx.Node) -> None:
    first, second, *rest = user.args
    kwargs = {name: value for name, value in user.kwargs.items() if value is not number}
    factor = _as_operand(make, user, number, second)
    user.args = (first, make(user, aten.mul.Tensor, second, factor), *rest)
    user.kwargs = kwargs


def _as_operand(make: _Maker, user: fx.Node, number: fx.Node, other: Any) -> fx.Node:
    """The number as an operator takes it beside another tensor."""
    value = other.meta["val"]
    # Of two tensors without dims the wider dtype is taken; of a number it never is.
    return number if value.ndim else _as_of(make, user, number, value)


def _as_of(make: _Maker, user: fx.Node, number: fx.Node, like: Any) -> fx.Node:
    dtype = like.dtype.to_real()
    how = {"dtype": dtype, "device": like.device, "non_blocking": True}
    return make(user, aten._to_copy.default, number, **how)
