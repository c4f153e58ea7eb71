"""`layout_differences`: tells where `to_local()` gives another part of a tensor than torch's would.

Values are the same there and here; what lies where is not. Torch itself is asked: every call is
repeated on torch's DTensors without data, in the layouts that they would have by then. Collectives
of tensors without data send nothing.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import local as thread_local
from typing import Any

import torch
from torch import Tensor
from torch.distributed import tensor as torch_dtensor
from torch.utils._pytree import tree_flatten, tree_map_only

from vescale_dtensor._dispatch.observers import CallObserver
from vescale_dtensor._layout.derived_placements import as_placement
from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._layout.local_shards import local_shape
from vescale_dtensor._layout.placement_base import Placement
from vescale_dtensor._layout.placements import Replicate, Shard
from vescale_dtensor._planning.plan import function_name
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._tensor.observers import observing
from vescale_dtensor._torch.call_site import call_site

logger = logging.getLogger("vescale_dtensor")


@dataclass(frozen=True)
class _Theirs:
    """How torch would have a tensor that lies otherwise here, and since which call.

    Attributes:
        placements: torch's; None where torch has no such call, or could not be asked.
        origin: the call from which on layouts differ, in words.
    """

    placements: tuple[Placement, ...] | None
    origin: str


class _Unknown(Exception):
    """Nobody knows how torch would have an operand."""


class _LayoutObserver(CallObserver):
    """The observer behind `layout_differences`."""

    def __init__(self) -> None:
        self.found: list[str] = []
        # Wrappers by identity, as `==` of them compares elements; an entry goes with its wrapper.
        self._theirs: dict[int, tuple[weakref.ref[DTensor], _Theirs]] = {}
        self._told: set[tuple[str, str]] = set()
        # Per thread, the open calls: only the outermost is one of the program's.
        self._calls = thread_local()

    def _stack(self) -> list[tuple[Callable[..., Any], Any, dict[str, Any]]]:
        if not hasattr(self._calls, "stack"):
            self._calls.stack = []
        stack: list[tuple[Callable[..., Any], Any, dict[str, Any]]] = self._calls.stack
        return stack

    def on_call(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
        self._stack().append((func, args, kwargs))

    def on_return(self, result: Any) -> None:
        stack = self._stack()
        func, args, kwargs = stack.pop()
        made = _wrappers(result)
        if stack or not made:
            return
        operands = _wrappers((args, kwargs))
        # What a call returns or changes of its operands lies as they do.
        fresh = [t for t in made if not any(t is operand for operand in operands)]
        if fresh:
            self._compare(func, args, kwargs, made, fresh, operands)

    def _compare(
        self,
        func: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
        made: list[DTensor],
        fresh: list[DTensor],
        operands: list[DTensor],
    ) -> None:
        """Ask torch for the layouts of results, and note those that differ."""
        before = next((known for t in operands if (known := self._known(t)) is not None), None)
        origin = f"{function_name(func)} at {call_site()}" if before is None else before.origin
        theirs = self._asked(func, args, kwargs)
        if theirs is None or len(theirs) != len(made):
            for tensor in fresh if before is not None else ():
                self._note(tensor, _Theirs(None, origin))
            return
        for tensor, placements in zip(made, theirs, strict=True):
            if any(tensor is one for one in fresh) and placements != tensor.placements:
                self._note(tensor, _Theirs(placements, origin))

    def _asked(
        self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> list[tuple[Placement, ...]] | None:
        """The layouts that torch gives the results of a call; None if it has no answer."""
        meshes = [t.device_mesh for t in _wrappers((args, kwargs))]
        try:
            with torch.no_grad(), torch.random.fork_rng():
                stand_ins = tree_map_only(
                    Tensor, lambda t: self._stand_in(t, meshes[0]), (args, kwargs)
                )
                found = func(*stand_ins[0], **stand_ins[1])
            results = [r for r in tree_flatten(found)[0] if isinstance(r, torch_dtensor.DTensor)]
            return [tuple(as_placement(p) for p in r.placements) for r in results]
        except Exception:  # whatever torch says of it: then there is nothing to compare with
            return None

    def _stand_in(self, tensor: Tensor, mesh: Any) -> Any:
        """A torch DTensor without data in place of an operand.

        Raises:
            _Unknown: torch would not have it.
        """
        placements: tuple[Placement, ...] | None = (Replicate(),) * mesh.ndim
        if isinstance(tensor, DTensor):
            known = self._known(tensor)
            placements = tensor.placements if known is None else known.placements
        if placements is None or any(p.is_sharded() and type(p) is not Shard for p in placements):
            raise _Unknown
        shape = local_shape(Layout.of(mesh, placements), tuple(tensor.shape))
        local = torch.empty(shape, dtype=tensor.dtype, device="meta")
        given: Any = placements  # ours are torch's, which its annotations do not know
        return torch_dtensor.DTensor.from_local(
            local, mesh, given, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )

    def _known(self, tensor: DTensor) -> _Theirs | None:
        """How torch would have a tensor, if otherwise."""
        reference, theirs = self._theirs.get(id(tensor), (None, None))
        return theirs if reference is not None and reference() is tensor else None

    def _note(self, tensor: DTensor, theirs: _Theirs) -> None:
        key = id(tensor)
        self._theirs[key] = weakref.ref(tensor, lambda _: self._theirs.pop(key, None)), theirs

    def on_to_local(self, tensor: DTensor) -> None:
        known = self._known(tensor)
        if known is None or known.placements is None:
            return
        site = call_site()
        if (site, known.origin) in self._told:
            return
        self._told.add((site, known.origin))
        shape = local_shape(Layout.of(tensor.device_mesh, known.placements), tuple(tensor.shape))
        self.found.append(
            f"{site}: to_local() of {tensor!r} is this rank's {list(tensor.placements)}, of shape "
            f"{list(tensor._local_tensor.shape)}; torch's would be {list(known.placements)}, "
            f"{list(shape)}, since {known.origin}. "
            f"x.redistribute(placements={list(known.placements)}).to_local() is that"
        )
        logger.warning(self.found[-1])


def _wrappers(value: Any) -> list[DTensor]:
    """The DTensors of a nested value."""
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, DTensor)]


@contextmanager
def layout_differences() -> Iterator[list[str]]:
    """Tell where `to_local()` gives another part of a tensor than torch.distributed.tensor would.

    Some results lie otherwise here than there (docs/from-torch.md has the table), so that a program
    which goes on with local tensors computes something else. In the block, each place where it
    takes such a local tensor is told once, by a warning of the logger `vescale_dtensor`, with the
    call from which on layouts differ. What torch refuses, or has no rule for, is not compared.

    Every call is planned twice, so this is for the first steps of a program that moves over.
    Nothing is sent for it, and random numbers stay as they are.

    Yields:
        What has been told, as a list that grows.

    Examples:
        with layout_differences():
            loss = model(batch).sum()
    """
    observer = _LayoutObserver()
    with observing(observer):
        yield observer.found
