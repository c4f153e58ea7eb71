"""The forms of an entry that are tried: function, aliases, method, in place, `out=`, by name."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from _entries import Sample
from _spellings import Spelled, spellings
from torch import Tensor
from torch.utils._pytree import tree_map


@dataclass(frozen=True)
class Form:
    """A way to write an entry.

    Attributes:
        name: `function`, `method`, `in place`, `out=`, the name of an alias, or how the arguments
            are named.
        call: called as `call(input, *args, **kwargs)`.
        writes: whether it changes `input`.
        out: whether results are written into tensors that are given.
    """

    name: str
    call: Callable[..., Any]
    writes: bool = False
    out: bool = False

    @property
    def spelled(self) -> bool:
        """Whether all its arguments are named."""
        return isinstance(self.call, Spelled)


def forms(entry: Any) -> list[Form]:
    """All forms of an entry; the function is the first."""
    found = [Form("function", entry.op)]
    found += [Form(f"alias {alias.name}", alias.op) for alias in entry.aliases]
    for name, call in (("method", entry.method_variant), ("operator", entry.operator_variant)):
        if call is not None and call is not entry.op:
            found.append(Form(name, call))
    in_place = ("inplace_variant", "inplace_operator_variant")
    for index, name in enumerate(in_place):
        call = getattr(entry, name, None)
        if call is not None:
            found.append(Form("in place" if index == 0 else "operator in place", call, writes=True))
    if entry.supports_out:
        found.append(Form("out=", entry.op, out=True))
    for kind, call in (("function", entry.op), ("method", entry.method_variant)):
        found += [Form(f"{kind} {words}", spelled) for words, spelled in spellings(call)]
    return found


def trials(
    entry: Any, samples: list[Sample], chosen: random.Random
) -> Iterator[tuple[int, Form, bool]]:
    """Which sample to call in which form, and whether in all scenarios or in one only."""
    function, *others = forms(entry)
    for index in range(len(samples)):
        yield index, function, True
    for form in others:
        # Two samples each: what differs from the function is how results come back.
        for index in chosen.sample(range(len(samples)), min(2, len(samples))):
            if not (form.writes and samples[index].broadcasts_input):
                yield index, form, False


def call(form: Form, sample: Sample, tensors: list[Tensor], out: Any = None) -> Any:
    """Call a form on these tensors in place of the sample's own."""
    feed = iter(tensors)

    def fed(value: Any) -> Any:
        return next(feed) if isinstance(value, Tensor) else value

    first, args, kwargs = tree_map(fed, (sample.input, sample.args, sample.kwargs))
    if form.writes:
        # Autograd admits a write to what is no leaf.
        first = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, first)
    if form.out:
        return form.call(first, *args, **{**kwargs, "out": out})
    return form.call(first, *args, **kwargs)


def detached(form: Form, tensors: list[Tensor], grad: bool) -> list[Tensor]:
    """Leaves with the values of these tensors; `out=` is not differentiable."""
    wanted = [grad and t.requires_grad and not form.out for t in tensors]
    copies = [t.detach().clone() for t in tensors]
    return [
        copy.requires_grad_() if wants else copy for copy, wants in zip(copies, wanted, strict=True)
    ]


def blank(result: Any) -> Any:
    """Tensors of the shapes of results, to write them into."""
    return tree_map(lambda x: torch.zeros_like(x.detach()) if isinstance(x, Tensor) else x, result)
