"""Merges the trees of all ranks into the one tree that is saved.

Ranks may hold different keys (the stages of a pipeline do); what several of them hold must agree.
"""

import json

from vescale_ckpt._errors import StateError
from vescale_ckpt._state.state_keys import child
from vescale_ckpt._state.values import Node, kind_of

# A node and the rank that holds it.
_Holders = list[tuple[int, Node]]


def merge(trees: list[Node]) -> Node:
    """Merge every rank's tree into one; `StateError` names the first path that disagrees."""
    if len(trees) == 1:
        return trees[0]
    return _merge(list(enumerate(trees)), "", len(trees), top=True)


def _merge(holders: _Holders, name: str, world_size: int, *, top: bool = False) -> Node:
    kinds = {kind_of(node) for _, node in holders}
    if len(kinds) > 1:
        raise _disagree(holders, name)
    match kinds.pop():
        case "dict":
            return _merge_dicts(holders, name, world_size, top=top)
        case "list":
            return _merge_items(holders, name, world_size)
        case "tuple":
            inner = [(rank, node["tuple"]) for rank, node in holders]
            return {"tuple": _merge_items(inner, name, world_size)}
        case "rank_local":
            return _merge_rank_local(holders, name, world_size)
        case _:
            # Compared as text: in Python 1 == 1.0 == True.
            if len({json.dumps(node) for _, node in holders}) > 1:
                raise _disagree(holders, name)
            return holders[0][1]


def _merge_dicts(holders: _Holders, name: str, world_size: int, *, top: bool) -> Node:
    entries: dict[str | int, _Holders] = {}
    # In the order of ranks and of their keys, so that every rank makes the same tree.
    for rank, node in holders:
        for key, entry in node["dict"]:
            entries.setdefault(key, []).append((rank, entry))
    return {
        "dict": [
            [key, _merge(under, child(name, key, top=top), world_size)]
            for key, under in entries.items()
        ]
    }


def _merge_items(holders: _Holders, name: str, world_size: int) -> list[Node]:
    if len({len(items) for _, items in holders}) > 1:
        raise _disagree(holders, name)
    return [
        _merge([(rank, items[i]) for rank, items in holders], child(name, i), world_size)
        for i in range(len(holders[0][1]))
    ]


def _merge_rank_local(holders: _Holders, name: str, world_size: int) -> Node:
    if len(holders) < world_size:
        has = [rank for rank, _ in holders]
        raise StateError(f"at '{name}': a RankLocal on rank(s) {has} only; every rank needs one")
    return {"rank_local": [node["rank_local"][0] for _, node in holders]}


def _disagree(holders: _Holders, name: str) -> StateError:
    first_rank, first = holders[0]
    mine = json.dumps(first)
    other_rank, other = next((r, n) for r, n in holders if json.dumps(n) != mine)
    return StateError(
        f"at '{name}': rank {first_rank} holds {_short(first)} and rank {other_rank} holds "
        f"{_short(other)}. Wrap it in RankLocal(...) if every rank has its own"
    )


def _short(node: Node) -> str:
    text = json.dumps(node)
    return text if len(text) <= 60 else f"{text[:57]}..."
