"""Results of expensive operators, kept from forward to backward while the rest is recomputed.

torch's `create_selective_checkpoint_contexts` counts every operator, and recomputation may run
others than forward did: a redistribution that forward had already made is made again. So only the
operators that are kept are counted here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from vescale_comm.nested import map_tensors, tensors_within

from vescale_parallel._common.torch_compat import alias_below_autograd, schema_of
from vescale_parallel._errors import ParallelError

FAMILIES: Final = {
    "matmul": "mm addmm linear _scaled_mm _grouped_mm _scaled_grouped_mm",
    "bmm": "bmm baddbmm",
    "attention": "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
    "_scaled_dot_product_fused_attention_overrideable _flash_attention_forward "
    "_efficient_attention_forward",
    "convolution": "convolution _convolution",
}
"""Operators of aten by family. Batched products make the scores of attention, as large as their
memory is scarce, and are a family of their own."""


@functools.lru_cache(maxsize=256)
def named_operators(name: str) -> frozenset[Any]:
    """Return the overloads of a family, or of `namespace::operator`; none if there are none."""
    if name in FAMILIES:
        parts = [("aten", one, "") for one in FAMILIES[name].split()]
    else:
        space, _, rest = name.partition("::")
        operator, _, overload = rest.partition(".")
        parts = [(space, operator, overload)]
    return frozenset(one for part in parts for one in _overloads(*part))


def _overloads(space: str, operator: str, overload: str) -> Iterable[Any]:
    packet = getattr(getattr(torch.ops, space), operator, None)
    if packet is None:
        return []
    names = [overload] if overload else packet.overloads()
    found = [getattr(packet, name, None) for name in names]
    # An overload that writes has no result of its own to keep.
    return [one for one in found if one is not None and not schema_of(one).is_mutable]


@dataclass(frozen=True, slots=True)
class _Result:
    """What an operator returned, of which inputs; versions tell whether it was written to since."""

    operator: Any
    inputs: tuple[Any, ...]
    outputs: Any
    versions: tuple[int, ...]
    # Of the same memory, with versions of their own.
    views: tuple[tuple[Tensor, int], ...] = ()


# From torch 2.15 on a product of rows is one of its results, and no view that autograd knows.
_UNSAFE_VIEW: Final = torch.ops.aten._unsafe_view.default


class Results:
    """Results of one run of a region.

    Args:
        names: of operators, or of families of them.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._operators = frozenset(one for name in names for one in named_operators(name))
        self._found: list[_Result] = []

    def keeps(self, operator: Any, args: Any, kwargs: Any) -> bool:
        """Whether the results of this call are kept.

        Not of one that draws random numbers: recomputed without it, the generator would be behind.
        """
        return operator in self._operators and not _draws(operator, args, kwargs)

    def keep(self) -> TorchDispatchMode:
        """The mode for forward."""
        return _Keep(self)

    def give(self) -> TorchDispatchMode:
        """The mode for a recomputation; there may be several, one after another."""
        return _Give(self)

    def add(self, operator: Any, args: Any, outputs: Any) -> None:
        """Keep one."""
        kept = map_tensors(alias_below_autograd, outputs)
        # What is kept shares its memory with what forward goes on with: a write in place changes it
        # here as well, and only the version tells.
        versions = tuple(one._version for one in tensors_within(kept))
        self._found.append(_Result(operator, _looks(args), kept, versions))

    def follow(self, view: Tensor) -> None:
        """Note what shares the memory of the last result and is written to by itself."""
        if not self._found:
            return
        # Not by address, which a tensor without values has none of.
        last, memory = self._found[-1], view.untyped_storage()._cdata
        if any(one.untyped_storage()._cdata == memory for one in tensors_within(last.outputs)):
            alias = alias_below_autograd(view)
            self._found[-1] = replace(last, views=(*last.views, (alias, alias._version)))

    def at(self, index: int, operator: Any, args: Any) -> Any | None:
        """The results of a call; None where they were written to and have to be computed again.

        Raises:
            ParallelError: forward made another call.
        """
        found = self._found[index] if index < len(self._found) else None
        if found is None or (found.operator, found.inputs) != (operator, _looks(args)):
            earlier = "none" if found is None else f"{found.operator} of {found.inputs}"
            raise ParallelError(
                f"checkpoint: recomputation calls {operator} of {_looks(args)}, and forward's call "
                f"number {index} was {earlier}. A module that is recomputed has to do the same "
                "again: branch on its arguments only, or give it 'none'."
            )
        if tuple(one._version for one in tensors_within(found.outputs)) != found.versions:
            return None
        if any(view._version != version for view, version in found.views):
            return None
        # Anew each time: autograd gives what is returned a history.
        return map_tensors(Tensor.detach, found.outputs)


class _Keep(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, results: Results) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        outputs = func(*args, **kwargs)
        if self._results.keeps(func, args, kwargs):
            self._results.add(func, args, outputs)
        elif func is _UNSAFE_VIEW:
            self._results.follow(outputs)
        return outputs


class _Give(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, results: Results) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Its own count: each recomputation begins at the first call again.
        self._results, self._next = results, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._results.keeps(func, args, kwargs):
            return func(*args, **kwargs)
        # By number: recomputation makes the calls that are kept in the order of the forward,
        # whatever it does between them.
        found = self._results.at(self._next, func, args)
        self._next += 1
        return func(*args, **kwargs) if found is None else found


def _draws(operator: Any, args: Any, kwargs: Any) -> bool:
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    names = [one.name for one in schema_of(operator).arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    defaults = {one.name: one.default_value for one in schema_of(operator).arguments}
    # Attention is marked for its dropout, and mostly has none.
    return bool(given.get("dropout_p", defaults.get("dropout_p", True)))


def _looks(args: Any) -> tuple[Any, ...]:
    return tuple((tuple(one.shape), one.dtype) for one in tensors_within(args))
