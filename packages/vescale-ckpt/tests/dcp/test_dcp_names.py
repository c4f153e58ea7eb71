"""The flat names of DCP and the saved tree: what torch flattens comes back as the same tree."""

import random

import pytest
import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from vescale_ckpt import StateError
from vescale_ckpt._dcp.names import leaves_of, paths_of, tensor_name, tree_of
from vescale_ckpt._state.flatten import flatten


def planned(state):
    """The names that DCP gives, and the way that leads to each."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, None, True)
    return planner.create_local_plan().planner_data


def random_state(rng, depth):
    kind = rng.choice(["dict", "list", "tensor", "value"] if depth else ["dict"])
    if depth == 3 or kind in ("tensor", "value"):
        return torch.zeros(2) if kind == "tensor" else rng.choice([1, 2.5, "x", None, (1, 2)])
    count = rng.randint(1, 3)
    if kind == "list":
        return [random_state(rng, depth + 1) for _ in range(count)]
    keys = rng.sample(["a", "b.c", "0.weight", "x/y", "~", 0, 7, -1], count)
    return {key: random_state(rng, depth + 1) for key in keys}


def test_leaves_have_the_names_of_torch():
    rng = random.Random(0)
    for _ in range(200):
        state = random_state(rng, 0)
        assert set(leaves_of(flatten(state, 0).tree)) == set(planned(state)), state


def test_the_tree_is_that_of_save():
    rng = random.Random(1)
    for _ in range(200):
        state = random_state(rng, 0)
        tree = flatten(state, 0).tree
        paths = paths_of(planned(state), planned(state))
        again = tree_of({paths[name]: node for name, node in leaves_of(tree).items()})
        assert again == tree, state
        for name, node in leaves_of(tree).items():
            if isinstance(node, dict) and "tensor" in node:
                assert node["tensor"] == tensor_name(paths[name])


def test_a_planner_that_keeps_no_ways():
    assert paths_of(None, ["a.b"]) == {"a.b": ("a.b",)}
    assert tree_of({("a.b",): 1}) == {"dict": [["a.b", 1]]}


def test_a_leaf_below_a_leaf():
    with pytest.raises(StateError, match=r"'a\.b' lies below"):
        tree_of({("a",): 1, ("a", "b"): 2})
    with pytest.raises(StateError, match=r"two entries of the state lead to 'a'"):
        tree_of({("a", "b"): 1, ("a",): 2})
    with pytest.raises(StateError, match=r"two entries of the checkpoint are called 'a\.b'"):
        leaves_of({"dict": [["a", {"dict": [["b", 1]]}], ["a.b", 2]]})
