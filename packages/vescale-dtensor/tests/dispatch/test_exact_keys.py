"""A compiled call answers calls of equal values only: 1, 1.0 and True are three values.

Torch refuses some of them. They are passed one after the other, by position and by name, alone and
in tuples and slices; an answer that was compiled for one must not be given for another.
"""

from types import BuiltinFunctionType, MethodDescriptorType

import pytest
import torch
from on_mesh import on_mesh
from vescale_comm import simulate
from vescale_dtensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from vescale_dtensor._dispatch.registry import known_rules
from vescale_dtensor._torch.schemas import wrong_flags

X = torch.arange(24.0).reshape(4, 6) / 7
KINDS = (int, float, bool, torch.tensor)
CALLS = {
    "flatten": lambda x, n: x.flatten(n(0)),
    "flatten, named": lambda x, n: x.flatten(start_dim=n(0)),
    "transpose": lambda x, n: x.transpose(dim0=n(0), dim1=1),
    "permute": lambda x, n: x.permute((n(1), n(0))),
    "permute, named": lambda x, n: x.permute(dims=(n(1), n(0))),
    "unsqueeze": lambda x, n: x.unsqueeze(dim=n(0)),
    "expand": lambda x, n: x[:1].expand((n(1), 6)),
    "chunk": lambda x, n: x.chunk(chunks=n(1), dim=n(0)),
    "split": lambda x, n: x.split(split_size=2, dim=n(0)),
    "narrow": lambda x, n: x.narrow(dim=n(0), start=n(0), length=n(1)),
    "select": lambda x, n: x.select(dim=n(0), index=n(1)),
    "sum": lambda x, n: x.sum(n(0), n(1)),
    "sum, named": lambda x, n: x.sum(dim=n(1), keepdim=n(1)),
    "mean": lambda x, n: x.mean(dim=(n(0), n(1))),
    "mean, kept": lambda x, n: x.mean(0, n(1)),
    "amax": lambda x, n: x.amax(dim=0, keepdim=n(1)),
    "amax of two": lambda x, n: x.amax(dim=(n(0), n(1))),
    "argmax": lambda x, n: x.argmax(dim=0, keepdim=n(1)),
    "var": lambda x, n: x.var(dim=0, unbiased=n(1)),
    "var, kept": lambda x, n: x.var((0,), keepdim=n(1)),
    "logsumexp": lambda x, n: x.logsumexp(0, n(1)),
    "softmax": lambda x, n: x.softmax(dim=n(1)),
    "cumsum": lambda x, n: x.cumsum(dim=n(1)),
    "topk": lambda x, n: x.topk(1, dim=0, largest=n(1)),
    "sort": lambda x, n: x.sort(dim=n(0), descending=n(1)),
    "add": lambda x, n: x.add(n(1), alpha=n(1)),
    "clamp": lambda x, n: x.clamp(min=n(0), max=n(1)),
    "permute, a list": lambda x, n: x.permute([n(1), n(0)]),
    "sum, a list": lambda x, n: x.sum(dim=[n(0)], keepdim=True),
    "softmax with a dtype": lambda x, n: x.softmax(n(1), dtype=torch.float64),
    "sum with a dtype, named": lambda x, n: x.sum(dim=n(1), keepdim=n(1), dtype=torch.float64),
    "mean of a tuple with a dtype": lambda x, n: x.mean((n(0), n(1)), False, dtype=torch.float64),
    "index": lambda x, n: x[n(0)],
    "slice": lambda x, n: x[n(0) : n(1)],
    "slices": lambda x, n: x[:, n(0) : n(1)],
    "a tuple that indexes": lambda x, n: x[(n(0), n(1), n(1), n(0)),],
}


def answer(call, x, kind):
    try:
        found = call(x, kind)
    except (TypeError, RuntimeError, IndexError):
        return "refused"
    parts = found if isinstance(found, tuple | list) else (found,)
    return [part.full_tensor() if isinstance(part, DTensor) else part for part in parts]


@pytest.mark.parametrize("name", CALLS)
def test_values_of_other_types(name):
    call = CALLS[name]
    expected = {kind: answer(call, X, kind) for kind in KINDS}

    def run(mesh):
        for placement in (Replicate(), Shard(0), Shard(1)):
            x = distribute_tensor(X, mesh, [placement])
            # In another order the second time: whichever came first may have been compiled.
            for kind in (*KINDS, *KINDS, *reversed(KINDS)):
                found = answer(call, x, kind)
                context = f"{name} with {kind.__name__}, {placement}"
                assert (found == "refused") == (expected[kind] == "refused"), (context, found)
                if found != "refused":
                    torch.testing.assert_close(found, list(expected[kind]), msg=context)

    on_mesh((2,), run)


def test_two_tensors_of_which_one_should_be_a_boolean_are_refused_by_torch():
    # Before they come to a rule, so that `refuses_flags` need not read schemas for two tensors.
    asked = (BuiltinFunctionType, MethodDescriptorType)
    functions = [func for func in known_rules() if isinstance(func, asked)]
    wrong = [f for f in functions for n in (1, 2) if wrong_flags(f, (X,) * n, {})]
    assert {"cholesky", "svd", "qr"} <= {f.__name__ for f in wrong}

    def run(rank, world_size):
        x = distribute_tensor(torch.eye(2), init_device_mesh("cpu", (2,)), [Replicate()])
        for func in wrong:
            with pytest.raises(TypeError, match="bool"):
                func(x, x)

    simulate(2)(run)
