"""What is no argument is refused with the argument's name, and nothing is drawn.

Above all: what has no `dim` counts as replicated, so a number or a string among the placements
would give every rank the whole tensor.
"""

import inspect

import numpy as np
import pytest
import torch
import vescale_rng as rng
from vescale_rng import Box, Normal, RngError, ShardLayout, layout_of


class Shard:
    dim = 0


LAYOUT = layout_of((6, 4), [Shard()], (2,), (0,))
LOCAL = torch.zeros(3, 4)
BOX = Box((0, 0), (3, 4), 0, (4, 1))

CALLS = {
    "a string as distribution": (lambda: rng.fill_(LOCAL, "normal", LAYOUT), "`distribution`"),
    "a class as distribution": (lambda: rng.fill_(LOCAL, Normal, LAYOUT), "`distribution`"),
    "a shape as layout": (lambda: rng.fill_(LOCAL, Normal(), [6, 4]), "`layout`"),
    "a string as layout": (lambda: rng.dropout(LOCAL, 0.5, "rows"), "`layout`"),
    "a list as local": (lambda: rng.fill_([1.0], Normal(), LAYOUT), "`local`"),
    "a list as local, alone": (lambda: rng.fill_([1.0], Normal()), "`local`"),
    "a number as generator": (lambda: rng.fill_(LOCAL, Normal(), LAYOUT, 3), "`generator`"),
    "p as text": (lambda: rng.dropout(LOCAL, "0.5", LAYOUT), "got p='0.5'"),
    "a place of another kind": (lambda: rng.streams.seek("start"), "`place`"),
    "one placement": (lambda: layout_of((6, 4), Shard(), (2,), (0,)), "`placements`"),
    "numbers as placements": (lambda: layout_of((6, 4), [0], (2,), (0,)), "`placements`: .*axis 0"),
    "tuples as placements": (lambda: layout_of((6, 4), [(0,)], (2,), (0,)), "`placements`"),
    "text as placements": (lambda: layout_of((6, 4), ["S"], (2,), (0,)), "`placements`"),
    "None as placement": (lambda: layout_of((6, 4), [None], (2,), (0,)), "`placements`"),
    "classes as placements": (lambda: layout_of((6, 4), [Shard], (2,), (0,)), "`placements`"),
    "one extent": (lambda: layout_of(6, [Shard()], (2,), (0,)), "`global_shape`"),
    "text as extents": (lambda: layout_of("64", [Shard()], (2,), (0,)), "`global_shape`"),
    "halves as extents": (lambda: layout_of((6.5, 4), [Shard()], (2,), (0,)), "`global_shape`"),
    "one mesh extent": (lambda: layout_of((6, 4), [Shard()], 2, (0,)), "`mesh_shape`"),
    "one coordinate": (lambda: layout_of((6, 4), [Shard()], (2,), 0), "`coordinate`"),
    "one box": (lambda: ShardLayout((6, 4), BOX), "`boxes`"),
    "tuples as boxes": (lambda: ShardLayout((6, 4), [((0, 0), (3, 4), 0, (4, 1))]), "`boxes`"),
    "a box without extents": (lambda: Box((0, 0), 3, 0, (4, 1)), "`shape`"),
    "whole of a number": (lambda: rng.whole(6), "`shape`"),
}


@pytest.mark.parametrize("what", CALLS)
def test_the_argument_is_named(what):
    call, said = CALLS[what]
    before = torch.get_rng_state()
    with pytest.raises(RngError, match=said):
        call()
    assert torch.equal(torch.get_rng_state(), before)
    assert not LOCAL.any()


def whole_layout():
    return rng.whole((3, 4))


GENERATOR = torch.Generator()
NUMBERS = {
    "Uniform": ("low", "high"),
    "Normal": ("mean", "std"),
    "LogNormal": ("mean", "std"),
    "Bernoulli": ("p",),
    "Exponential": ("rate",),
    "Geometric": ("p",),
    "Cauchy": ("median", "sigma"),
}
ROWS = {"layout": LAYOUT, "generator": GENERATOR}
LOCAL_ROWS = {"local": LOCAL.clone(), **ROWS}
ALL = {"layout": whole_layout(), "generator": GENERATOR}
GOOD = {  # arguments that are right, of which the test below replaces one at a time
    **{name: dict.fromkeys(names, 0.5) for name, names in NUMBERS.items()},
    "fill_": {**LOCAL_ROWS, "distribution": Normal()},
    "dropout": {**LOCAL_ROWS, "p": 0.5},
    "native_dropout": {**LOCAL_ROWS, "p": 0.5, "train": True},
    "alpha_dropout": {**LOCAL_ROWS, "p": 0.5},
    "feature_dropout": {**LOCAL_ROWS, "p": 0.5},
    "feature_alpha_dropout": {**LOCAL_ROWS, "p": 0.5},
    "rand": {**ROWS, "dtype": torch.float32, "device": "cpu"},
    "randn": {**ROWS, "dtype": torch.float32, "device": "cpu"},
    "randint": {**ROWS, "low": 0, "high": 9, "dtype": torch.int64, "device": "cpu"},
    "rand_like": {**LOCAL_ROWS, "dtype": torch.float32},
    "randn_like": {**LOCAL_ROWS, "dtype": torch.float32},
    "randint_like": {**LOCAL_ROWS, "low": 0, "high": 9, "dtype": torch.int64},
    "gumbel_like": LOCAL_ROWS,
    "randperm": {"n": 12, "dtype": torch.int64, "generator": GENERATOR},
    "multinomial": {
        "probabilities": torch.ones(3, 4), "num_samples": 2, "replacement": False, **ROWS
    },
    "bernoulli": {"input": LOCAL, "p": 0.5, **ROWS},
    "bernoulli_": {**LOCAL_ROWS, "p": 0.5},
    "normal": {"mean": LOCAL, "std": 1.0, **ROWS},
    "poisson": {"rates": LOCAL, **ALL},
    "binomial": {"count": LOCAL, "probabilities": LOCAL, **ALL},
    "rrelu": {"input": LOCAL, "lower": 0.1, "upper": 0.3, **ALL},
    "trunc_normal_": {**LOCAL_ROWS, "mean": 0.0, "std": 1.0, "a": -2.0, "b": 2.0},
    "advance": {"words": 3, "generator": GENERATOR},
    "position": {"generator": GENERATOR},
    "fingerprint": {"generator": GENERATOR},
    "seek": {"place": rng.streams.position(GENERATOR), "generator": GENERATOR},
    "draws": {
        "distribution": Normal(), "shape": (6, 4), "dtype": torch.float32,
        "memory_order": (0, 1), "cached": False, "device": "cpu",
    },
    "skip": {
        "distribution": Normal(), "shape": (6, 4), "dtype": torch.float32,
        "memory_order": (0, 1), "generator": GENERATOR,
    },
    "get_state": {"generator": GENERATOR},
    "set_state": {"state": rng.get_state(GENERATOR), "generator": GENERATOR},
    "RandInt": {"low": 0, "high": 9},
    "Multinomial": {"num_samples": 2, "replacement": False},
    "BernoulliOf": {"p_dtype": torch.float32},
    "layout_of": {
        "global_shape": (6, 4), "placements": [Shard()], "mesh_shape": (2,), "coordinate": (0,)
    },
    "layout_of_slices": {"global_shape": (6, 4), "slices": slice(0, 3)},
    "whole": {"shape": (6, 4)},
    "Box": {"global_offset": (0, 0), "shape": (3, 4), "local_offset": 0, "local_strides": (4, 1)},
    "ShardLayout": {
        "global_shape": (6, 4), "boxes": [BOX], "replica": (0, 1), "memory_order": (0, 1),
        "local_shape": (3, 4),
    },
}  # fmt: skip
# Of no kind that any argument takes, but for numbers, which are tried where one is none.
WRONG = {
    "a list": [1.5],
    "text": "words",
    "an object": object(),
    "a dict": {"a": 1},
    "half a number": 1.5,
    "a truth value": True,
    "less than nothing": -1,
    "a tensor of another device": torch.empty(3, 4, device="meta"),
}
# What a wrong value may be all the same: torch judges numbers, and takes booleans for no others.
TAKEN = {
    "half a number": ("low", "high", "mean", "std", "rate", "median", "sigma", "p", "a", "b",
                      "lower", "upper"),
    "a truth value": ("train", "replacement", "cached"),
    "less than nothing": ("low", "high", "mean", "std", "rate", "median", "sigma", "p", "a", "b",
                          "lower", "upper", "num_samples", "local_offset"),
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_each_argument_of_each_function_is_refused_by_its_name(name):
    function, good = getattr(rng, name, None) or getattr(rng.streams, name), GOOD[name]
    function(**good)
    for argument in good:
        for kind, value in WRONG.items():
            if argument in TAKEN.get(kind, ()):
                continue
            with pytest.raises(RngError) as caught:
                function(**{**good, argument: value})
            assert f"`{argument}`" in str(caught.value), (argument, kind, str(caught.value))


def test_no_public_function_is_left_out():
    left = {"as_layout", "at", "check_in_step", "layout_of_tensor", "no_native_draws", "policy",
            "threads_of", "use", "use_threads"}  # fmt: skip
    modules = (rng, rng.streams, rng.cuda)
    functions = {n for m in modules for n in m.__all__ if inspect.isfunction(getattr(m, n))}
    assert functions - left <= set(GOOD)
    with pytest.raises(RngError, match="`name`: policy 3 was asked for"), rng.use(3):
        pass


def test_lists_are_as_good_as_tuples():
    by_lists = ShardLayout([6, 4], [Box([0, 0], [3, 4], 0, [4, 1])])
    assert by_lists == ShardLayout((6, 4), (BOX,))
    assert hash(by_lists) == hash(ShardLayout((6, 4), (BOX,)))
    torch.manual_seed(0)
    expected = torch.empty(6, 4).normal_()
    torch.manual_seed(0)
    assert torch.equal(rng.fill_(torch.empty(3, 4), Normal(), by_lists), expected[:3])


def test_other_numbers_are_extents_too():
    shape, mesh = np.array([6, 4]), torch.Size([2])
    assert layout_of(shape, [Shard()], mesh, (np.int64(0),)) == LAYOUT


class Buffer:
    """Somebody's array: it has DLPack, and nothing else."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


@pytest.mark.parametrize("policy", ["native", "portable"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_numpy_arrays_and_dlpack_are_filled_in_place(policy, dtype):
    with rng.use(policy):
        torch.manual_seed(0)
        tensor = rng.fill_(torch.from_numpy(np.empty((3, 4), dtype)), Normal(), LAYOUT)
        state = torch.get_rng_state()
        torch.manual_seed(0)
        array = np.empty((3, 4), dtype)
        assert rng.fill_(array, Normal(), LAYOUT) is array
        assert np.array_equal(array, tensor.numpy())
        assert torch.equal(torch.get_rng_state(), state)
        memory = torch.empty_like(tensor)
        torch.manual_seed(0)
        rng.fill_(Buffer(memory), Normal(), LAYOUT)
        assert torch.equal(memory, tensor)
        # A layout of their own: whole arrays, and one in columns.
        torch.manual_seed(0)
        one = rng.fill_(np.empty((6, 4), dtype), Normal())
        assert np.array_equal(one[:3], array)
        columns = layout_of((6, 4), [Shard()], (2,), (1,), local_strides=(1, 3))
        torch.manual_seed(0)
        part = rng.fill_(np.empty((3, 4), dtype, order="F"), Normal(), columns)
        assert np.array_equal(part, one[3:])


def test_memory_that_cannot_be_filled():
    frozen = np.zeros((3, 4))
    frozen.flags.writeable = False
    with pytest.raises(RngError, match=r"`local`: this numpy\.ndarray is read-only"):
        rng.fill_(frozen, Normal(), LAYOUT)
    with pytest.raises(RngError, match="`local`: torch cannot share"):
        rng.fill_(np.zeros((3, 4))[::-1], Normal(), LAYOUT)
    with pytest.raises(RngError, match="`local`: torch cannot share"):
        rng.fill_(np.array(["a"]), Normal(), LAYOUT)
