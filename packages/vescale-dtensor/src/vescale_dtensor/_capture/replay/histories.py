"""The autograd graphs of two runs of one call: whether they are alike, and what backward gives.

A graph is followed from the outputs to what the call was given, its ends: arguments with a history,
and leaves from outside. Two graphs are alike if their nodes have the same names, in order, and
reach the same ends: what a stale flag detaches, or computes in another way, shows. What differs in
backward alone shows in gradients: those of the graph that is used are seen by hooks, as they come
to the ends; the other graph is run for the same cotangents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from vescale_dtensor._capture.guard.call_key import cached_uses
from vescale_dtensor._capture.record.outputs import tensors_in
from vescale_dtensor._capture.replay.changed_state import local_of, same_values
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._torch.compat import hidden_node

_Key = tuple[int, int]
# Of this package are the nodes that type gradients and sum them over ranks; a program leaves out
# those that do nothing, and copies that nobody else sees.
_OWN = __name__.partition(".")[0]
_COPIES = frozenset({"CloneBackward0"})


class Ends:
    """Where the graph of a call ends: leaves, arguments, and what was made of these before.

    Args:
        flat: the arguments of the call, before any run.
        leaves: those from outside that the program knows.
    """

    def __init__(self, flat: Sequence[Any], leaves: Sequence[Tensor]) -> None:
        self.names: dict[_Key, str] = {}
        # Of leaves, which a program knows with all uses of a call.
        self.leaves: set[_Key] = set()
        # Ids are those of nodes that live.
        self._nodes: list[Any] = []
        if torch.is_inference_mode_enabled():  # in which there are no nodes
            return
        for index, value in enumerate(flat):
            if isinstance(value, Tensor):
                self._add(value, f"argument {index}, {_words(value)}")
        known = set(self.names)
        for leaf in leaves:
            self._add(leaf, f"a leaf, {_words(leaf)}")
        self.leaves = set(self.names) - known

    def _add(self, tensor: Tensor, name: str) -> None:
        local = local_of(tensor)
        if local.requires_grad:
            self._note(local, name)
        if isinstance(tensor, DTensor):
            aliases, cached = cached_uses(tensor)
            masks = () if aliases is None else (*aliases.by_mask.values(), *aliases.apart.values())
            for alias in masks:
                if alias.requires_grad:
                    self._note(alias, name)
            if cached is not None:
                self._add(cached, name)

    def _note(self, local: Tensor, name: str) -> None:
        edge = get_gradient_edge(local)
        self._nodes.append(edge.node)
        self.names.setdefault((id(edge.node), edge.output_nr), name)


@dataclass
class History:
    """The graph of the outputs of one run.

    Attributes:
        roots: local tensors among the outputs that have a history of this call.
        names: of its nodes, in order.
        ends: by their edges, what they are, in the order in which they are met.
        edges: these edges.
        before: nodes that lead to an end, and at which of their inputs.
        shared: ends to which a node leads that calls after this one may use as well.
        known: whether all of it is known.
    """

    roots: list[Tensor]
    names: list[str] = field(default_factory=list)
    ends: dict[_Key, str] = field(default_factory=dict)
    edges: dict[_Key, GradientEdge] = field(default_factory=dict)
    before: list[tuple[Any, list[tuple[int, _Key]]]] = field(default_factory=list)
    shared: set[_Key] = field(default_factory=set)
    known: bool = True

    def difference(self, other: History) -> str | None:
        """What differs from the graph of the function, in words."""
        if not (self.known and other.known):
            return None
        for mine, its in ((self.ends, other.ends), (other.ends, self.ends)):
            for key in mine:
                if key not in its:
                    who = "the function" if mine is self.ends else "the replay"
                    return f"what gradients flow to: {mine[key]} gets none from {who}"
        if len(self.roots) != len(other.roots):
            return "which outputs require a gradient"
        if self.names == other.names:
            return None
        pairs = zip([*self.names, "nothing"], [*other.names, "nothing"], strict=False)
        one, two = next((one, two) for one, two in pairs if one != two)
        return f"the autograd graph of the outputs ({one} where the function has {two})"


def history_of(outputs: Any, ends: Ends) -> History:
    """Follow the graph of the outputs of a run."""
    tensors = tensors_in(outputs)
    own = [one for one in tensors if isinstance(one, DTensor)]
    # A custom Function's node is on the wrapper itself, until the next op takes it over.
    known = not any(hidden_node(one) is not None for one in own)
    roots = [local for one in tensors if (local := local_of(one)).requires_grad]
    found = History([], known=known)
    stack: list[tuple[Any, int]] = []
    for root in roots:
        edge = get_gradient_edge(root)
        if (id(edge.node), edge.output_nr) in ends.names:
            # An argument, or a leaf, itself: later calls give it gradients as well.
            found.shared.add((id(edge.node), edge.output_nr))
        else:
            found.roots.append(root)
            stack.append((edge.node, edge.output_nr))
    seen: set[int] = set()
    kept = []  # so that no id is used twice
    stack.reverse()
    while stack:
        node, _ = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        kept.append(node)
        if not _is_transparent(node):
            found.names.append(node.name())
        before, following = [], []
        for place, (after, number) in enumerate(node.next_functions):
            if after is None:
                continue
            key = id(after), number
            name = ends.names.get(key)
            if name is None:
                following.append((after, number))
                continue
            before.append((place, key))
            found.ends.setdefault(key, name)
            found.edges.setdefault(key, GradientEdge(after, number))
        if before:
            found.before.append((node, before))
            if _is_own(node):
                # It sums gradients over ranks, and stays with the argument for whoever uses that
                # next: what comes through it is not of this call alone.
                found.shared |= {key for _, key in before if key not in ends.leaves}
        stack += reversed(following)
    return found


def _is_own(node: Any) -> bool:
    made_by = getattr(type(node), "_forward_cls", None)
    return made_by is not None and made_by.__module__.partition(".")[0] == _OWN


def _is_transparent(node: Any) -> bool:
    return _is_own(node) or node.name() in _COPIES


def _words(tensor: Tensor) -> str:
    return str(tensor._spec) if isinstance(tensor, DTensor) else str(list(tensor.shape))


class GradientCheck:
    """Compares the gradients of two graphs for the cotangents that come to the one that is used.

    It is told of these by hooks on nodes of that graph, and holds none of its tensors: a graph that
    is dropped takes the check with it.

    Args:
        other: the graph that nobody else uses.
        finish: called with what differs, in words, or None, and a function that runs the other
            graph once more and says whether it gave the same. On every rank, in backward.
        watched: whether somebody else is told of gradients at the ends by now, and would be twice.
    """

    def __init__(
        self,
        other: History,
        finish: Callable[[str | None, Callable[[], bool]], None],
        watched: Callable[[], bool],
    ) -> None:
        self._other: History | None = other
        self._asks: tuple[Any, Any] | None = (finish, watched)
        self._left: set[int] = set()
        self._roots_left: set[int] = set()
        self._cotangents: dict[int, Tensor | None] = {}
        self._totals: dict[_Key, Tensor] = {}
        self._shared: set[_Key] = set()

    def watch(self, used: History) -> None:
        """Have the nodes of the graph that is used tell what comes to them."""
        self._shared = used.shared
        for number, (node, places) in enumerate(used.before):
            self._left.add(number)
            node.register_hook(self._sums(number, places))
        by_node: dict[int, tuple[Any, list[tuple[int, int]]]] = {}
        for index, root in enumerate(used.roots):
            edge = get_gradient_edge(root)
            known = by_node.setdefault(id(edge.node), (edge.node, []))
            known[1].append((index, edge.output_nr))
        # Behind the node, and not before it: what it computes with has been gathered by then.
        for key, (node, outputs) in by_node.items():
            self._roots_left.add(key)
            node.register_hook(self._takes(key, outputs))

    def _sums(self, number: int, places: list[tuple[int, _Key]]) -> Callable[[Any, Any], None]:
        def arrived(gradients: Any, _: Any) -> None:
            if self._other is None or self._is_again(number, self._left):
                return
            with torch.no_grad():
                for place, key in places:
                    one = gradients[place]
                    if one is not None:
                        # In the order of arrival, as the engine adds.
                        before = self._totals.get(key)
                        self._totals[key] = one.detach() if before is None else before + one
            self._left.discard(number)
            self._compare()

        return arrived

    def _takes(self, key: int, outputs: list[tuple[int, int]]) -> Callable[[Any, Any], None]:
        def arrived(_: Any, cotangents: Any) -> None:
            if self._other is None or self._is_again(key, self._roots_left):
                return
            for index, place in outputs:
                one = cotangents[place]
                self._cotangents[index] = None if one is None else one.detach()
            self._roots_left.discard(key)
            self._compare()

        return arrived

    def _is_again(self, one: int, left: set[int]) -> bool:
        """Whether a node was run before; then there are two backwards, and nothing is compared."""
        if one not in left:
            self._forget()
        return self._other is None

    def _forget(self) -> None:
        self._other, self._asks = None, None
        self._totals, self._cotangents = {}, {}

    def _compare(self) -> None:
        other, asks = self._other, self._asks
        if self._left or self._roots_left or other is None or asks is None:
            return
        finish, watched = asks
        # All ranks go on to `finish`: hooks may differ.
        first = {} if watched() else self._gradients(other)
        found = None
        for key, mine in first.items():
            its = self._totals.get(key)
            # What backward was not asked for (`inputs=`) arrives nowhere.
            if key in self._shared:
                continue
            if its is not None and (mine is None or not same_values(mine, its)):
                found = f"the gradient of {other.ends[key]}"
                break
        # Once: a graph that is kept may be run again.
        self._other, self._asks, self._totals = None, None, {}

        def repeats() -> bool:
            again = self._gradients(other)
            pairs = [(mine, again[key]) for key, mine in first.items()]
            return all(
                two is None if one is None else two is not None and same_values(one, two)
                for one, two in pairs
            )

        try:
            finish(found, repeats)
        finally:
            self._cotangents = {}

    def _gradients(self, other: History) -> dict[_Key, Tensor | None]:
        """What the other graph gives for these cotangents."""
        pairs = [(other.roots[i], g) for i, g in self._cotangents.items() if g is not None]
        edges = _first(other.edges)
        if not pairs or not edges:
            return {}
        roots, cotangents = zip(*pairs, strict=True)
        hooks = _fixed(pairs)
        try:
            found = torch.autograd.grad(
                roots, list(edges.values()), cotangents, retain_graph=True, allow_unused=True
            )
        finally:
            for hook in hooks:
                hook.remove()
        return dict(zip(edges, found, strict=True))


def _first(edges: dict[_Key, GradientEdge]) -> dict[_Key, GradientEdge]:
    """The ends that no other end was computed from.

    A decoder's block is given the encoder's states, and what the block before made of these:
    backward to the former would go on through that block, and give what comes from there as well.
    """
    seen: set[int] = set()
    kept = []  # so that no id is used twice
    stack = [edge.node for edge in edges.values()]
    while stack:
        for before, _ in stack.pop().next_functions:
            if before is not None and id(before) not in seen:
                seen.add(id(before))
                kept.append(before)
                stack.append(before)
    return {key: edge for key, edge in edges.items() if id(edge.node) not in seen}


def _fixed(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[RemovableHandle]:
    """Let what comes to the nodes of these roots be these cotangents, and nothing besides.

    A root may lie in the history of another, as logits do in that of their loss: what comes to it
    from there is part of the cotangent that was seen, and would come a second time.
    """
    by_node: dict[int, tuple[Any, dict[int, Tensor]]] = {}
    for root, cotangent in pairs:
        edge = get_gradient_edge(root)
        by_node.setdefault(id(edge.node), (edge.node, {}))[1][edge.output_nr] = cotangent

    def arrived(known: dict[int, Tensor]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
        return lambda came: tuple(known.get(place, one) for place, one in enumerate(came))

    return [node.register_prehook(arrived(known)) for node, known in by_node.values()]
