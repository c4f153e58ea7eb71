"""Matches a saved tree with the state to load into: what goes where, and what does not fit."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from vescale_ckpt._errors import as_checkpoint_error
from vescale_ckpt._format.manifest import Manifest
from vescale_ckpt._load.overlap import Twins, overlaps_itself, without_twins
from vescale_ckpt._state.rebuild import holds_tensor, rebuild, tensor_names
from vescale_ckpt._state.select import fits, patterns_of, renamed
from vescale_ckpt._state.state_keys import child, of_rank
from vescale_ckpt._state.values import WHOLE, Node, RankLocal, Replicated, Whole, kind_of
from vescale_ckpt._tensors.boxes import TensorBoxes
from vescale_ckpt._tensors.dtypes import converts, torch_dtype
from vescale_ckpt._tensors.local_boxes import is_tensor_like, local_and_boxes

_ABSENT = object()


@dataclass
class Match:
    """The result state (its tensors yet to be filled), and every difference that was found."""

    state: Any = None
    # What to read, and into what: (name in the manifest, local memory, its boxes).
    targets: list[tuple[str, torch.Tensor, TensorBoxes]] = field(default_factory=list)
    # Names that only `into` has, that only the checkpoint has, and sentences about both.
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    clashes: list[str] = field(default_factory=list)
    # Where `into` has an empty dict and the checkpoint does not: most likely a fresh optimizer.
    empty_dicts: list[str] = field(default_factory=list)
    # Rank-local values to be computed from those of all saving ranks, once these are read.
    deferred: list[tuple[RankLocal, list[Any]]] = field(default_factory=list)
    # Pairs of names that are one tensor of `into`, yet to be compared by reading both.
    unproven: list[Twins] = field(default_factory=list)
    # Globs of `only` that name nothing, neither here nor in the checkpoint.
    unused: list[str] = field(default_factory=list)


class Selection(NamedTuple):
    """Which part of a checkpoint is loaded, under which names, and as what."""

    only: str | tuple[str, ...] | None = None
    rename: Mapping[str, str] | None = None
    cast: bool = False


EVERYTHING = Selection()


def match(
    manifest: Manifest, into: Any, rank: int, world_size: int, selection: Selection = EVERYTHING
) -> Match:
    """Match a checkpoint with `into`. Touches no tensor data."""
    walk = _Walk(manifest, rank, world_size, selection)
    # Differences are collected, not raised one by one: the user sees all of them, of all ranks.
    walk.found.state = walk.node(renamed(manifest.state, selection.rename), into, "", top=True)
    found = walk.found
    found.targets, refused, found.unproven = without_twins(manifest, found.targets)
    found.clashes += refused
    walk.found.unused = [glob for glob in patterns_of(selection.only) if glob not in walk.used]
    return walk.found


class _Walk:
    def __init__(
        self, manifest: Manifest, rank: int, world_size: int, selection: Selection
    ) -> None:
        self.manifest, self.selection = manifest, selection
        self.rank = rank
        self.world_size = world_size
        self.found = Match()
        self.used: set[str] = set()

    def node(self, node: Node, into: Any, name: str, *, top: bool = False) -> Any:
        """Return the result for `node`: tensors of `into`, values of the checkpoint."""
        if isinstance(into, Whole):
            return self.whole(node) if self.wants(name) else into
        if isinstance(into, Replicated):
            return Replicated(self.node(node, into.value, name, top=top), into.check)
        # Containers before `wants`: globs name leaves, so containers are always entered.
        kind = kind_of(node)
        if kind == "dict" and isinstance(into, dict):
            return self.dict_(node["dict"], into, name, top=top)
        if kind in ("list", "tuple") and isinstance(into, (list, tuple)):
            items = node if kind == "list" else node["tuple"]
            result = self.items(items, into, name)
            return result if kind == "list" else tuple(result)
        if not self.wants(name):
            return into
        if kind == "tensor" and is_tensor_like(into):
            return self.tensor(node["tensor"], into)
        if kind == "rank_local" and isinstance(into, RankLocal):
            return self.rank_local(node["rank_local"], into, name)
        # Plain values come from the checkpoint, whatever placeholder `into` has for them.
        if kind == "rank_local" or _has_tensor(into) or holds_tensor(node):
            saved, wanted = _describe(node), _describe_into(into)
            self.found.clashes.append(f"'{name}': the checkpoint holds {saved}, `into` {wanted}")
            return into
        return rebuild(node, {})

    def wants(self, name: str) -> bool:
        """Return whether a leaf of that name is to be loaded."""
        if self.selection.only is None:
            return True
        matching = [glob for glob in patterns_of(self.selection.only) if fits(glob, name)]
        # Every glob that matches counts as used, not only the first.
        self.used.update(matching)
        return bool(matching)

    def dict_(self, pairs: list[Any], into: dict[Any, Any], name: str, *, top: bool) -> Any:
        """Match in the checkpoint's order, then what only `into` has: an error if strict."""
        result = {}
        saved = set()
        for key, node in pairs:
            saved.add(key)
            inner = child(name, key, top=top)
            if key in into:
                result[key] = self.node(node, into[key], inner)
            else:
                value = self.not_asked_for(node, inner)
                if value is not _ABSENT:
                    result[key] = value
        if not into and pairs:
            self.found.empty_dicts.append(name)
        for key in into:
            if key not in saved:
                self.missing(into[key], child(name, key, top=top))
                result[key] = into[key]
        return result

    def items(self, nodes: list[Node], into: list[Any] | tuple[Any, ...], name: str) -> list[Any]:
        """Match entry by entry. A list of plain values may have another length when saved."""
        if len(nodes) != len(into) and (_has_tensor(into) or holds_tensor(nodes)):
            self.found.clashes.append(
                f"'{name}': the checkpoint holds {len(nodes)} entries, `into` {len(into)}"
            )
            return list(into)
        if len(nodes) != len(into):
            return [rebuild(node, {}) for node in nodes]
        pairs = enumerate(zip(nodes, into, strict=True))
        return [self.node(node, entry, child(name, i)) for i, (node, entry) in pairs]

    def tensor(self, saved_name: str, into: Any) -> Any:
        """Note that `into` is to be filled, if shape and dtype are those that were saved."""
        record = self.manifest.tensors[saved_name]
        try:
            local, layout = local_and_boxes(into)
        except Exception as error:
            # Any exception, also of the tensor's own class, as for a partial DTensor: with the name
            # of the leaf.
            self.found.clashes.append(f"'{saved_name}': {as_checkpoint_error(error)}")
            return into
        if any(map(overlaps_itself, layout.boxes)):
            self.found.clashes.append(
                f"'{saved_name}': elements of `into` share memory (an expanded "
                "view, or sliding windows): clone() it first"
            )
            return into
        wanted = (str(local.dtype).removeprefix("torch."), layout.global_shape)
        cast = self.selection.cast and converts(torch_dtype(record.dtype), local.dtype)
        if wanted != (wanted[0] if cast else record.dtype, record.shape):
            self.found.clashes.append(
                f"'{saved_name}': the checkpoint holds {_shaped(record.dtype, record.shape)}, "
                f"`into` {_shaped(*wanted)}"
            )
        # Noted also where it clashes: nothing is read then, and later checks see all targets.
        self.found.targets.append((saved_name, local, layout))
        return into

    def rank_local(self, nodes: list[Node], into: RankLocal, name: str) -> RankLocal:
        """Return this rank's own value, or what `reshard` makes of all of them."""
        if len(nodes) == self.world_size:
            # Nothing to fill: use what this rank saved.
            value = WHOLE if into.value is None else into.value
            inner = of_rank(name, self.rank)
            return RankLocal(self.node(nodes[self.rank], value, inner), into.reshard)
        result = RankLocal(None, into.reshard)
        if into.reshard is None:
            self.found.clashes.append(
                f"'{name}': saved by {len(nodes)} ranks, loaded by {self.world_size}: give `into` "
                "a RankLocal(value, reshard=...) that says what each rank gets"
            )
        else:
            # `reshard` needs the values of all saving ranks, which are read first.
            self.found.deferred.append((result, [self.whole(node) for node in nodes]))
        return result

    def whole(self, node: Node) -> Any:
        """Return all of a subtree as new, full tensors on the CPU."""
        tensors = {}
        for name in tensor_names(node):
            record = self.manifest.tensors[name]
            # Not zeroed: every element is read, or the load raises.
            tensors[name] = torch.empty(record.shape, dtype=torch_dtype(record.dtype), device="cpu")
            local, layout = local_and_boxes(tensors[name])
            self.found.targets.append((name, local, layout))
        return rebuild(node, tensors)

    def not_asked_for(self, node: Node, name: str) -> Any:
        """Load plain values; report tensors and rank-local state."""
        if not self.wants(name) and kind_of(node) != "dict":
            return _ABSENT
        if kind_of(node) == "rank_local":
            self.found.unexpected.append(name)
            return _ABSENT
        if kind_of(node) == "dict" and self.selection.only is not None:
            inner = {k: self.not_asked_for(n, child(name, k)) for k, n in node["dict"]}
            kept = {k: value for k, value in inner.items() if value is not _ABSENT}
            return kept or _ABSENT
        names = list(tensor_names(node))
        self.found.unexpected.extend(names)
        return _ABSENT if names else rebuild(node, {})

    def missing(self, into: Any, name: str) -> None:
        """Note every leaf of `into` that the checkpoint has nothing for."""
        if isinstance(into, dict) and into:
            for key, entry in into.items():
                self.missing(entry, child(name, key))
        elif isinstance(into, (list, tuple)) and into:
            for i, entry in enumerate(into):
                self.missing(entry, child(name, i))
        elif into is not WHOLE and self.wants(name) and not isinstance(into, (dict, list, tuple)):
            self.found.missing.append(name)


def _has_tensor(into: Any) -> bool:
    if isinstance(into, dict):
        return any(map(_has_tensor, into.values()))
    if isinstance(into, (list, tuple)):
        return any(map(_has_tensor, into))
    if isinstance(into, Replicated):
        return _has_tensor(into.value)
    return isinstance(into, RankLocal) or is_tensor_like(into)


def _describe(node: Node) -> str:
    return {
        "dict": "a dict",
        "list": "a list",
        "tuple": "a tuple",
        "tensor": "a tensor",
        "rank_local": "one value per rank (RankLocal)",
    }.get(kind_of(node), "a plain value")


def _describe_into(into: Any) -> str:
    return "a tensor" if is_tensor_like(into) else f"a {type(into).__name__}"


def _shaped(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"
