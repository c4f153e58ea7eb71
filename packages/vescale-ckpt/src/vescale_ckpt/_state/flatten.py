"""Takes a nested state apart: a tree of JSON nodes, and its tensors by name."""

from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field

import torch

from vescale_ckpt._errors import StateError
from vescale_ckpt._state.state_keys import child, of_rank
from vescale_ckpt._state.values import MAX_DEPTH, Node, RankLocal, Replicated, encode_value
from vescale_ckpt._tensors.local_boxes import is_tensor_like

# Exactly these. An OrderedDict or a defaultdict comes back as a dict, which serves as well; any
# other class may carry more than its entries.
_DICTS = (dict, OrderedDict, defaultdict)


@dataclass
class FlatState:
    """One rank's state, flattened."""

    tree: Node
    tensors: dict[str, object] = field(default_factory=dict)
    # Names of tensors inside a RankLocal: no other rank has a copy of them.
    private: set[str] = field(default_factory=set)
    # Names of tensors inside a Replicated, and whether copies are to be compared.
    replicated: dict[str, bool] = field(default_factory=dict)


def flatten(state: object, rank: int) -> FlatState:
    """Flatten `state`; raises `StateError` with the path of what cannot be saved."""
    if type(state) not in _DICTS:
        raise StateError(f"the state must be a dict, not a {type(state).__name__}")
    walk = _Walk(rank)
    return FlatState(walk.dict_node(state, "", 0), walk.tensors, walk.private, walk.replicated)


class _Walk:
    """One pass over a state; names are built on the way down."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.tensors: dict[str, object] = {}
        self.private: set[str] = set()
        self.inside_rank_local = False
        self.replicated: dict[str, bool] = {}
        self.compare: bool | None = None

    def node(self, value: object, name: str, depth: int) -> Node:
        """Return the node of any value; raise naming it if it cannot be saved."""
        if depth > MAX_DEPTH:
            raise StateError(f"{name[:80]}...: nested deeper than {MAX_DEPTH} (or a cycle)")
        if is_tensor_like(value):
            return self.tensor(value, name)
        if isinstance(value, RankLocal):
            return self.rank_local(value, name, depth)
        if isinstance(value, Replicated):
            return self.of_all(value, name, depth)
        if type(value) in _DICTS:
            return self.dict_node(value, name, depth)
        if type(value) is list:
            return self.items(value, name, depth)
        # A named tuple would come back without its names, so it is refused like any object.
        if type(value) in (tuple, torch.Size):
            return {"tuple": self.items(value, name, depth)}
        try:
            return encode_value(value)
        except StateError as error:
            raise StateError(f"at '{name}': {error}") from None

    def dict_node(self, value: object, name: str, depth: int) -> Node:
        """Return pairs, not a JSON object: its keys would all become strings."""
        assert isinstance(value, dict)
        pairs = []
        for key, entry in value.items():
            if type(key) not in (str, int):
                raise StateError(
                    f"at '{name}': a dict key must be a string or an integer, not {key!r} "
                    f"({type(key).__name__})"
                )
            # What every JSON reader can hold exactly.
            if isinstance(key, int) and key.bit_length() > 53:
                raise StateError(f"at '{name}': integer key {key} does not fit into 53 bits")
            try:
                encode_value(key)
            except StateError as error:
                raise StateError(f"at '{name}': a key {key!r:.80}: {error}") from None
            pairs.append([key, self.node(entry, child(name, key, top=depth == 0), depth + 1)])
        return {"dict": pairs}

    def items(self, value: object, name: str, depth: int) -> list[Node]:
        """Return the nodes of a list's or tuple's entries."""
        assert isinstance(value, (list, tuple))
        return [self.node(entry, child(name, i), depth + 1) for i, entry in enumerate(value)]

    def tensor(self, value: object, name: str) -> Node:
        """Return a reference by name; the tensor itself is not looked at yet."""
        self.tensors[name] = value
        if self.inside_rank_local:
            self.private.add(name)
        if self.compare is not None:
            self.replicated[name] = self.compare
        return {"tensor": name}

    def of_all(self, value: Replicated, name: str, depth: int) -> Node:
        """Save what every rank holds as if it were not wrapped."""
        if self.inside_rank_local:
            raise StateError(f"at '{name}': a Replicated inside a RankLocal")
        # The innermost `Replicated` decides; the one around it counts again afterwards.
        before, self.compare = self.compare, value.check
        node = self.node(value.value, name, depth + 1)
        self.compare = before
        return node

    def rank_local(self, value: RankLocal, name: str, depth: int) -> Node:
        """Return this rank's entry of a list that the ranks will concatenate."""
        if self.inside_rank_local:
            raise StateError(f"at '{name}': a RankLocal inside a RankLocal")
        self.inside_rank_local = True
        node = self.node(value.value, of_rank(name, self.rank), depth + 1)
        self.inside_rank_local = False
        return {"rank_local": [node]}
