"""What an operator writes into its operands is written, wherever they lie: by whatever means.

Autograd's version counters do not show writes through `.data` or by kernels of other people. The
schemas of registered operators say what they write; a Python function that says nothing is watched.
So for every kind of arguments among the 900 schemas of torch that write, an operator with these
arguments writes below autograd's counters, into operands in layouts that are drawn at random.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from typing import Any

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


EVERY = torch.library.Library("vescale_every_schema", "DEF")
# As `str(argument.type)` says it; `{}` is where an alias is written.
KINDS = {
    "Tensor": "Tensor{}",
    "Optional[Tensor]": "Tensor{}?",
    "List[Tensor]": "Tensor{}[]",
    "List[Optional[Tensor]]": "Tensor{}?[]",
    "Optional[List[Tensor]]": "Tensor{}[]?",
}


def _tensor_arguments(schema: Any) -> tuple[tuple[str, str, bool, bool], ...]:
    """Kind, name, whether it is written, and whether it is named, of each argument with tensors."""
    return tuple(
        (str(a.type), a.name, a.alias_info is not None and a.alias_info.is_write, a.kwarg_only)
        for a in schema.arguments
        if str(a.type) in KINDS
    )


def _signatures() -> list[tuple[tuple[str, str, bool, bool], ...]]:
    """One of each kind; names are those of the first schema, as `out=` is special by its name."""
    found = {}
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        if not isinstance(packet, type(torch.ops.aten.add)):
            continue
        for overload in packet.overloads():
            arguments = _tensor_arguments(getattr(packet, overload)._schema)
            if any(written for _, _, written, _ in arguments):
                kind = tuple((k, n if named else "", w, named) for k, n, w, named in arguments)
                found.setdefault(kind, arguments)
    return list(found.values())


SIGNATURES = _signatures()


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif value is not None:
            yield from _tensors(value)


def _operator(index: int) -> Any:
    """An operator with a signature, which writes twice itself and the sum of all operands."""
    arguments, words = SIGNATURES[index], []
    for at, (kind, name, written, named) in enumerate(arguments):
        if named and "*" not in words:
            words.append("*")
        alias = f"(a{at}!)" if written else ""
        words.append(f"{KINDS[kind].format(alias)} {name}")
    EVERY.define(f"op{index}({', '.join(words)}) -> ()")

    def write(*args: Any, **kwargs: Any) -> None:
        given = dict(zip((a[1] for a in arguments), args, strict=False)) | kwargs
        total = sum(t.data.clone() for t in _tensors(given.values()))
        for _, name, written, _ in arguments:
            for target in _tensors([given[name]]) if written else ():
                target.data.copy_(target.data * 2 + total)

    EVERY.impl(f"op{index}", write, "CompositeExplicitAutograd")
    return getattr(torch.ops.vescale_every_schema, f"op{index}")


OPERATORS = [_operator(index) for index in range(len(SIGNATURES))]


def _given(index: int, place: Any) -> tuple[list[Any], dict[str, Any]]:
    """Arguments for an operator, tensors of which `place` makes."""
    args, kwargs, count = [], {}, 0
    for kind, name, _, named in SIGNATURES[index]:
        several = 2 if "List" in kind else 1
        made = [place(torch.arange(10.0).reshape(5, 2) + count + i) for i in range(several)]
        count += several
        value = made if "List" in kind else made[0]
        if named:
            kwargs[name] = value
        else:
            args.append(value)
    return args, kwargs


def _writes_arrive(rank: int, world_size: int) -> None:
    logging.disable(logging.WARNING)
    mesh = device_mesh((2,))
    for index, operator in enumerate(OPERATORS):
        chosen = random.Random(index)

        def place(whole: torch.Tensor, chosen: random.Random = chosen) -> torch.Tensor:
            return vd.distribute_tensor(whole, mesh, chosen.choice(LAYOUTS), src_data_rank=None)

        args, kwargs = _given(index, place)
        wanted, named = _given(index, lambda whole: whole)
        for call in (operator, operator.default):  # a known call, too
            call(*args, **kwargs)
            call(*wanted, **named)
            pairs = zip(
                _tensors([*args, *kwargs.values()]),
                _tensors([*wanted, *named.values()]),
                strict=True,
            )
            for number, (found, expected) in enumerate(pairs):
                message = f"operand {number} of {operator.default._schema}"
                assert torch.equal(found.full_tensor(), expected), message


@pytest.fixture
def silent():
    yield
    logging.disable(logging.NOTSET)


def test_what_every_kind_of_schema_writes_arrives(silent):
    assert len(SIGNATURES) > 70
    simulate(2)(_writes_arrive)


SQUARE = torch.arange(1.0, 17.0).view(4, 4) / 17
TWO = torch.tensor([0, 1])
GIVEN = (
    (), (0.5,), (1,), (0, 1), (SQUARE,), (SQUARE, SQUARE), (1.0, 2.0), (SQUARE > 0.5, 1.0),
    (0, TWO, 1.0), (0, TWO, SQUARE[:2]), (TWO, TWO.float()), (torch.tensor(0), torch.tensor(1.0)),
    (0, torch.zeros(4, 4).long(), 1.0), (SQUARE, SQUARE, 0.5),
)  # fmt: skip
# They change what a tensor is; and of real numbers the last is the tensor itself.
NO_WRITES = "share_memory_ requires_grad_ rename_ detach_ set_ resize_ resize_as_ conj_physical_"


def _raised(x, name, args):
    try:
        getattr(x, name)(*args)
    except (RuntimeError, TypeError, IndexError) as error:
        return error
    return None


@pytest.mark.filterwarnings("ignore")
@on_ranks(2, simulated=True)
def test_a_leaf_is_written_to_where_one_device_does(silent):
    logging.disable(logging.WARNING)
    mesh, wrong, count = device_mesh((2,)), [], 0
    names = [n for n in dir(torch.Tensor) if n.endswith("_") and not n.startswith("_")]
    for name in names:
        for args in GIVEN if name not in NO_WRITES.split() else ():
            if _raised(SQUARE.clone(), name, args):
                continue
            leaf = SQUARE.clone().requires_grad_()
            expected, count = _raised(leaf, name, args), count + 1
            for placements in ([Replicate()], [Shard(0)]):
                x = _placed(SQUARE, mesh, placements).requires_grad_()
                found = _raised(x, name, args)
                if bool(found) != bool(expected) or not torch.equal(x.full_tensor(), leaf):
                    wrong.append((name, args, placements, str(expected), str(found)))
    assert count > 150
    assert not wrong


@on_ranks(2, simulated=True)
def test_draws_by_probabilities_of_their_own_forget_what_was_there(rank, world_size):
    mesh = device_mesh((world_size,))
    for placements in ([Replicate()], [Shard(1)]):
        x = _placed(SQUARE, mesh, placements).requires_grad_()
        (x * 2).bernoulli_(_placed(SQUARE, mesh, placements)).sum().backward()
        assert not x.grad.full_tensor().any()
