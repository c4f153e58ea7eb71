"""Operators with every signature that a writing operator of torch has: their writes arrive.

An operator of another library may write to what its schema says, by whatever means. So for every
kind of arguments among the 900 schemas of torch that write, an operator with these arguments writes
below autograd's counters, into operands in layouts that are drawn at random.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import vescale_dtensor as vd
from vescale_comm import simulate
from vescale_comm.testing import device_mesh
from vescale_dtensor import Partial, Replicate, Shard

LIBRARY = torch.library.Library("vescale_every_schema", "DEF")
LAYOUTS = [[Shard(0)], [Shard(1)], [Replicate()], [Partial()], [vd.RaggedShard((0,), (1, 4))]]
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
    LIBRARY.define(f"op{index}({', '.join(words)}) -> ()")

    def write(*args: Any, **kwargs: Any) -> None:
        given = dict(zip((a[1] for a in arguments), args, strict=False)) | kwargs
        total = sum(t.data.clone() for t in _tensors(given.values()))
        for _, name, written, _ in arguments:
            for target in _tensors([given[name]]) if written else ():
                target.data.copy_(target.data * 2 + total)

    LIBRARY.impl(f"op{index}", write, "CompositeExplicitAutograd")
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
def quiet():
    yield
    logging.disable(logging.NOTSET)


def test_what_every_kind_of_schema_writes_arrives(quiet):
    assert len(SIGNATURES) > 70
    simulate(2)(_writes_arrive)
