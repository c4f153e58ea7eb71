"""What an operator writes into its operands is written, wherever they lie: by whatever means.

Autograd's version counters do not show writes through `.data` or by kernels of other people. The
schemas of registered operators say what they write; a Python function that says nothing is watched.
"""

from __future__ import annotations

import logging

import pytest
import torch
import vescale_dtensor as vd
from torch.overrides import handle_torch_function, has_torch_function
from vescale_comm import simulate
from vescale_comm.testing import device_mesh, on_ranks
from vescale_dtensor import Partial, Replicate, Shard, UnsupportedError
from vescale_dtensor._torch.schemas import written_operands

LIBRARY = torch.library.Library("vescale_writes", "DEF")


def _defined(schema, function):
    LIBRARY.define(schema)
    LIBRARY.impl(schema.split("(", 1)[0], function, "CPU")


def _bump(p, g):
    p.data.sub_(g)


def _bump_all(ps, gs, m=None):
    for p, g in zip(ps, gs, strict=True):
        p.data.sub_(g)
    if m is not None:
        m.data.add_(1)


def _into(x, *, out):
    out.data.copy_(x * 2)
    return out


def _triple(x):
    x.data.mul_(3)
    return x


def _two(x, *, first, second):
    x.data.add_(1)
    first.data.copy_(x)
    second.data.copy_(x * 2)
    return first, second


_defined("bump(Tensor(a!) p, Tensor g) -> ()", _bump)
_defined("bump_all(Tensor(a!)[] ps, Tensor[] gs, Tensor(b!)? m=None) -> ()", _bump_all)
_defined("into(Tensor x, *, Tensor(a!) out) -> Tensor(a!)", _into)
_defined("triple(Tensor(a!) x) -> Tensor(a!)", _triple)
_defined(
    "two(Tensor(a!) x, *, Tensor(b!) first, Tensor(c!) second) -> (Tensor(b!), Tensor(c!))", _two
)


# Torch calls these, and only its compiler believes the schema.
_defined("untold(Tensor p, Tensor g) -> ()", _bump)
_defined("untold_result(Tensor p, Tensor g) -> Tensor", lambda p, g: (_bump(p, g), g * 2)[1])


_defined("flat(Tensor(a) x) -> Tensor(a)", lambda x: x.view(-1))


def python_function(p, g):
    """One of another library, that knows nothing of us and says nothing of what it writes."""
    if has_torch_function((p, g)):
        return handle_torch_function(python_function, (p, g), p, g)
    p.data.sub_(g)
    p.data[0] = torch.nan
    return g * 1


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, p, g):
        p.data.sub_(g)
        return g * 1

    backward = staticmethod(lambda ctx, cotangent: (None, cotangent))


@torch.library.custom_op("vescale_writes::custom", mutates_args=("p",))
def custom(p: torch.Tensor, g: torch.Tensor) -> None:
    p.data.sub_(g)


OPS = torch.ops.vescale_writes
CASES = {
    "a tensor": lambda p, g: OPS.bump(p, g),
    "an overload": lambda p, g: OPS.bump.default(p, g),
    "by name": lambda p, g: OPS.bump(g=g, p=p),
    "a list": lambda p, g: OPS.bump_all([p], [g]),
    "an optional one": lambda p, g: OPS.bump_all([], [], p),
    "an optional one by name": lambda p, g: OPS.bump_all([], [], m=p),
    "out": lambda p, g: OPS.into(g, out=p),
    "out of an overload": lambda p, g: OPS.into.default(g, out=p),
    "one that is returned": lambda p, g: OPS.triple(p),
    "two outs": lambda p, g: OPS.two(p, first=g, second=p * 1)[1],
    "a custom op": lambda p, g: custom(p, g),
    "itself": lambda p, g: OPS.bump(p, p),
    "an untold write": lambda p, g: OPS.untold(p, g),
    "an untold write of an overload": lambda p, g: OPS.untold.default(p=p, g=g),
    "an untold write beside a result": lambda p, g: OPS.untold_result(p, g),
    "a Python function": python_function,
    "an autograd.Function": Function.apply,
    "torch's overload with out": lambda p, g: torch.ops.aten.add.out(g, g, out=p),
    "torch's op in place": lambda p, g: torch.ops.aten.add_.Tensor(p, g),
    "torch's fused optimizer": lambda p, g: torch.ops.aten._fused_sgd_.default(
        [p], [g], [], weight_decay=0.0, momentum=0.0, lr=1.0, dampening=0.0, nesterov=False,
        maximize=False, is_first_step=True,
    ),
}  # fmt: skip
LAYOUTS = [[Shard(0)], [Shard(1)], [Replicate()], [Partial()], [vd.RaggedShard((0,), (1, 4))]]


def _placed(whole, mesh, placements):
    return vd.distribute_tensor(whole, mesh, placements, src_data_rank=None)


@pytest.mark.parametrize("name", CASES)
@on_ranks(2, simulated=True)
def test_writes_arrive(name):
    logging.disable(logging.WARNING)
    mesh, run = device_mesh((2,)), CASES[name]
    whole, step = torch.arange(10.0).reshape(5, 2), torch.full((5, 2), 0.5)
    for placements in LAYOUTS:
        p, g = _placed(whole, mesh, placements), _placed(step, mesh, [Shard(0)])
        q, h = whole.clone(), step.clone()
        found, wanted = run(p, g), run(q, h)
        torch.testing.assert_close(p.full_tensor(), q, equal_nan=True, rtol=0, atol=0)
        torch.testing.assert_close(g.full_tensor(), h, rtol=0, atol=0)
        if isinstance(wanted, torch.Tensor):
            torch.testing.assert_close(found.full_tensor(), wanted, equal_nan=True)
            assert (found is p) == (wanted is q)
        assert p.placements == tuple(placements)


@pytest.mark.parametrize(
    ("name", "refused"), [("a tensor", False), ("an untold write beside a result", True)]
)
@on_ranks(2, simulated=True)
def test_writes_arrive_in_replays_or_are_refused(name, refused):
    """A replay would leave out an operator whose result nobody needs and that states no write."""
    logging.disable(logging.WARNING)
    mesh, run = device_mesh((2,)), CASES[name]
    step = _placed(torch.full((5, 2), 0.5), mesh, [Shard(0)])

    def twice(p, g):
        q = p * 2
        run(q, g)
        return q

    whole, captured = torch.arange(10.0).reshape(5, 2), vd.capture(twice)
    for _ in range(3):
        if refused:
            with pytest.raises(vd.CaptureError):
                captured(_placed(whole, mesh, [Shard(1)]), step)
            continue
        found = captured(_placed(whole, mesh, [Shard(1)]), step)
        assert torch.equal(found.full_tensor(), whole * 2 - 0.5)


def test_a_shape_without_values_is_not_compared():
    def program(rank, world_size):
        logging.disable(logging.WARNING)
        p = _placed(torch.ones(4, 2, device="meta"), device_mesh((2,)), [Shard(0)])
        assert OPS.untold_result(p, p).shape == (4, 2)

    LIBRARY.impl("untold_result", lambda p, g: torch.empty_like(g), "Meta")
    simulate(2)(program)


@on_ranks(2, simulated=True)
def test_a_write_that_a_copied_view_would_miss_is_refused():
    logging.disable(logging.WARNING)
    mesh = device_mesh((2,))
    x = _placed(torch.arange(10.0).reshape(5, 2), mesh, [Shard(0)])
    view = OPS.flat(x)
    with pytest.raises(UnsupportedError, match="forced a copy"):
        OPS.bump(view, torch.ones(10))
    with pytest.raises(UnsupportedError, match="forced a copy"):
        OPS.bump(x, torch.ones(5, 2))


def _argument(argument):
    """Something of the type that a schema asks for, with tensors in it."""
    kind = str(argument.type)
    if "Tensor" not in kind:
        return 0
    tensor = torch.zeros(())
    return [tensor, tensor] if kind.startswith("List") or "List[" in kind else tensor


def _written_schemas():
    packets = (getattr(torch.ops.aten, name) for name in dir(torch.ops.aten))
    overloads = (
        getattr(packet, name)
        for packet in packets
        if isinstance(packet, type(torch.ops.aten.add))
        for name in packet.overloads()
    )
    # TorchScript has more, that write lists.
    mutable = [o for o in overloads if o._schema.is_mutable]
    return [o for o in mutable if any("Tensor" in str(a.type) for a in o._schema.arguments)]


def test_every_schema_of_torch_that_writes_is_read_right():
    schemas = _written_schemas()
    assert len(schemas) > 1000
    for overload in schemas:
        arguments = overload._schema.arguments
        values = [_argument(a) for a in arguments]
        args = [v for a, v in zip(arguments, values, strict=True) if not a.kwarg_only]
        kwargs = {a.name: v for a, v in zip(arguments, values, strict=True) if a.kwarg_only}
        found, at, wanted = written_operands(overload, tuple(args), kwargs), 0, set()
        for argument, value in zip(arguments, values, strict=True):
            count = len(value) if isinstance(value, list) else int(isinstance(value, torch.Tensor))
            if argument.alias_info is not None and argument.alias_info.is_write:
                wanted |= set(range(at, at + count))
            at += count
        assert found == wanted, overload


@on_ranks(2, simulated=True)
def test_a_result_does_not_go_into_another_kind_of_number(rank, world_size):
    mesh = device_mesh((world_size,), ("tp",))
    x = vd.distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    into = vd.distribute_tensor(torch.zeros(4, dtype=torch.int64), mesh, [Shard(0)])
    for function in (torch.exp, lambda x, out: torch.add(x, x, out=out)):
        with pytest.raises(RuntimeError, match=r"can't be cast to torch\.int64"):
            function(x, out=into)
    assert into.full_tensor().tolist() == [0] * 4
