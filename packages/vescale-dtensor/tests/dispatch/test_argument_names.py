"""Arguments given by name, in any order, or by NumPy's name: the same as on one device.

`test_every_argument_name` sweeps the names of every entry of torch's operator database.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from one_device import check
from vescale_comm import simulate
from vescale_comm.testing import device_mesh, on_ranks
from vescale_dtensor import Partial, Replicate, Shard, distribute_tensor
from vescale_dtensor._dispatch.argument_names import NUMPY, named_as_torch_does

torch.manual_seed(0)
WHOLE = torch.randn(4, 6)
OTHER = torch.randn(4, 6)

METHODS = [
    *("transpose", "permute", "flatten", "squeeze", "unsqueeze", "expand", "t", "chunk"),
    *("narrow", "select", "mean", "sum", "pow", "softmax", "log_softmax", "amax", "amin"),
    *("argmax", "argmin", "var", "std", "cumsum", "float", "double", "half", "neg", "abs"),
    *("square", "sqrt", "exp", "relu"),
]

# Those that keep dims on request, and others that are along a dim.
KEEPING = [
    *("sum", "mean", "amax", "amin", "argmax", "argmin", "max", "min"),
    *("all", "any", "nansum", "nanmean", "median", "nanmedian"),
]
REDUCTIONS = [*KEEPING, "prod", "std", "var", "cumsum", "cumprod", "sort", "softmax", "aminmax"]


def _reductions(place):
    x = place(WHOLE)
    return [getattr(torch, name)(x, axis=0) for name in REDUCTIONS]


def _kept_dims(place):
    x = place(WHOLE)
    return [getattr(torch, name)(x, axis=1, keepdims=True) for name in KEEPING]


def _methods(place):
    x = place(WHOLE)
    return [
        x.mean(axis=0, keepdims=True),
        x.unsqueeze(axis=1),
        x.repeat_interleave(2, axis=0),
        x.add(x2=OTHER),
        x.mul(other=place(OTHER)),
        x.where(other=place(OTHER), condition=place(WHOLE) > 0),
        x.flatten().squeeze(axis=0),
        torch.cat([x, x], axis=0),
        torch.stack([x, x], axis=1),
        x.softmax(axis=1),
    ]


def _operands_by_name(place):
    x, y = place(WHOLE), place(OTHER, Replicate(), Shard(0))
    return [
        torch.sub(other=y, input=x),
        torch.sub(x2=y, x1=x),
        torch.sub(a=x, other=y),
        torch.addmm(mat2=y.t(), mat1=x, input=place(torch.randn(4, 4))),
        torch.where(other=y, input=x, condition=x > 0),
        torch.mean(input=x, dim=1),
        torch.mean(x=x),
        torch.linalg.vecdot(y=y, x=x),
        torch.nn.functional.linear(weight=y, input=x),
        torch.ops.aten.sub.Tensor(other=y, self=x),
    ]


def _often(place):
    """Known calls, too: what is kept of the first must fit the next."""
    x = place(WHOLE)
    return [torch.amax(x, axis=i % 2, keepdims=bool(i % 3)) for i in range(12)]


def _gradients(place):
    x = place(WHOLE, grad=True)
    (torch.mean(input=x * place(OTHER), axis=1, keepdims=True) ** 2).sum(axis=0).sum().backward()
    return x.grad


def _numpys_functions(place):
    return [np.argmax(place(WHOLE), axis=0), np.cumsum(place(WHOLE), axis=1)]


def _handlers(place):
    x = place(WHOLE)
    assert not x.requires_grad_(requires_grad=False).requires_grad
    assert torch.result_type(tensor=x, other=2.0) is torch.float32
    return [x.tile(dims=(2, 1)), x.sum_to_size(size=(1, 6)), torch.full_like(input=x, fill_value=2)]


PROGRAMS = {
    name.strip("_"): program
    for name, program in list(globals().items())
    if name.startswith("_") and getattr(program, "__module__", "") == __name__
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_as_on_one_device(name):
    simulate(4)(lambda rank, world_size: check(PROGRAMS[name]))


GIVEN = {"axis": {"axis": 0}, "keepdims": {"axis": 0, "keepdims": True}}


@pytest.mark.parametrize("alias", NUMPY)
def test_every_name_of_numpys_is_one_that_torch_takes(alias):
    x = torch.arange(4.0).reshape(2, 2)
    func = torch.add if NUMPY[alias] == "other" else torch.sum
    args, given = (() if NUMPY[alias] == "input" else (x,)), GIVEN.get(alias, {alias: x})
    positional, named = named_as_torch_does(func, args, given)
    assert alias not in named
    assert torch.equal(func(*positional, **named), func(*args, **given))


def test_torch_takes_no_others_of_numpys():
    for name in ("axes", "y", "b", "ddof", "where"):
        with pytest.raises(TypeError):
            torch.sum(torch.ones(2), **{name: 0})


WRONG = [((), {"ddof": 1}), ((), {"axis": 1, "where": 0}), ((0,), {"bogus": 1})]


def _refuses(tensor, name, args, named):
    try:
        getattr(tensor, name)(*args, **named)
    except (TypeError, RuntimeError):
        return True
    return False


@on_ranks(2, simulated=True)
def test_methods_refuse_names_that_torch_lacks():
    """A rule reads what it knows, and would leave out the rest in silence."""
    x = distribute_tensor(WHOLE, device_mesh((2,)), [Shard(0)])
    calls = [(n, *w) for n, w in itertools.product(METHODS, WRONG) if _refuses(WHOLE, n, *w)]
    assert len(calls) > 2 * len(METHODS)
    for call in calls * 2:  # the second call finds what the first one left
        assert _refuses(x, *call), call


def test_names_of_their_own_are_left_alone():
    x = torch.ones(2, 2)
    for func, kwargs in (
        (torch.linalg.vecdot, {"x": x, "y": x}),
        (torch.nn.functional.cosine_similarity, {"x1": x, "x2": x}),
        (torch.special.chebyshev_polynomial_t, {"x": x, "n": 2}),
    ):
        args, named = named_as_torch_does(func, (), kwargs)
        assert torch.equal(func(*args, **named), func(**kwargs))


def test_calls_in_the_usual_form_are_not_rewritten():
    x = torch.ones(2, 2)
    for func, args, kwargs in (
        (torch.sum, (x,), {"dim": 0}),
        (torch.searchsorted, (x, x), {"sorter": x}),
        (torch.nn.functional.cross_entropy, (x, x), {"weight": x}),
    ):
        found = named_as_torch_does(func, args, kwargs)
        assert list(map(id, found[0])) == list(map(id, args))
        assert list(found[1]) == list(kwargs)


def test_tensors_come_by_position_as_far_as_no_default_is_left_out():
    x, y = torch.ones(2, 2), torch.zeros(2, 2)
    args, kwargs = named_as_torch_does(torch.add, (x,), {"alpha": 2, "other": y})
    assert list(map(id, args)) == [id(x), id(y)]
    assert kwargs == {"alpha": 2}
    args, kwargs = named_as_torch_does(torch.clamp, (x,), {"max": y})  # `min` is left out
    assert list(map(id, args)) == [id(x)]
    assert list(kwargs) == ["max"]


def _deprecated_form(place):
    x, y, z = (place(WHOLE.t() @ OTHER + i) for i in range(3))
    return torch.addmm(2.0, x, 1.0, mat2=y, mat1=z)


@pytest.mark.filterwarnings("ignore:This overload of addmm is deprecated")
def test_names_that_fit_no_schema_go_to_the_fallback():
    """Torch's parser takes them in any order; a rule would take one operand for another."""
    simulate(4)(lambda rank, world_size: check(_deprecated_form))


def _partial_by_name(place):
    x = place(WHOLE, Partial(), Shard(0))
    return torch.sum(input=x, axis=1), torch.mul(x2=x, x1=x)


def test_partial_sums():
    simulate(4)(lambda rank, world_size: check(_partial_by_name))
