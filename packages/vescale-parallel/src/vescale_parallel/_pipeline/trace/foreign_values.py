"""Marks values of other stages, and what is computed from them.

A stage runs all of a model's forward up to its last block, so it meets values that only other
stages have. They are marked, and whatever is computed from a marked tensor is marked. A marked
tensor that enters a block of this stage is one that the stage before has to send; one that gets
into a loss, or is read, is an error. Masks and tables that are computed from shapes alone carry no
mark, and are this stage's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from vescale_comm.nested import map_tensors, named_tensors_within, tensors_within
from vescale_dtensor import DTensor

from vescale_parallel._errors import PipelineError
from vescale_parallel._pipeline.trace.leaks import Leaks, name_of

_READS: Final = frozenset(
    {
        *(
            "item",
            "tolist",
            "numpy",
            "__bool__",
            "__int__",
            "__float__",
            "__index__",
            "__complex__",
        ),
        *("__array__", "__contains__", "equal", "allclose", "is_nonzero", "nonzero", "argwhere"),
        *("masked_select", "unique", "unique_consecutive"),
    }
)
"""What turns values into numbers or shapes of Python."""

_FLAT: Final = frozenset(
    {Tensor, nn.Parameter, DTensor, type(None), bool, int, float, str}
    | {torch.dtype, torch.device, torch.Size}
)
"""Types of arguments that hold no other tensors."""

_FORMS: Final = frozenset(
    {
        *("size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "get_device"),
        *("is_floating_point", "is_complex", "is_contiguous", "storage_offset", "data_ptr"),
        *("to", "type", "type_as", "__hash__", "__len__", "__repr__", "__format__"),
    }
)
"""What takes a tensor for its shape, dtype or device, beside `new_zeros` and `zeros_like`."""


class ForeignValues(TorchFunctionMode):
    """Marks what is computed from values of other stages, while one stage runs its forward.

    Attributes:
        known: by `id` of a marked tensor, the value that has come since.
        collected: by `id` of a marked tensor, which result of an earlier unit it stands for.
        used: which of these were used, as far as functions were watched.
        leaks: what watches values that get out of blocks; None: nobody looks.
        elsewhere: by `id`, parameters of which this rank holds no elements, with their names.
        is_touched: whether a function took a marked tensor, other than to ask for its shape.
    """

    def __init__(self, stage: int, leaks: Leaks | None = None) -> None:
        super().__init__()
        self.stage, self.leaks, self.is_touched = stage, leaks, False
        # The tensors are kept: an `id` names an object only as long as it lives.
        self._marked: dict[int, Tensor] = {}
        self.known: dict[int, Tensor] = {}
        self.collected: dict[int, str] = {}
        self.used: set[str] = set()
        self.elsewhere: dict[int, tuple[str, Tensor]] = {}

    def mark(self, tensors: Iterable[Tensor]) -> None:
        """Note tensors whose values are not known here."""
        for one in tensors:
            self._marked[id(one)] = one

    def is_unknown(self, tensor: Tensor) -> bool:
        """Whether the value of a tensor is on another stage, and has not come."""
        return id(tensor) in self._marked and id(tensor) not in self.known

    @property
    def has_marked(self) -> bool:
        """Whether there are values that are not known here."""
        return bool(self._marked)

    def note_used(self, tensors: Iterable[Tensor]) -> None:
        """Code outside of the units uses these."""
        if self.collected:
            self.used.update([self.collected[id(t)] for t in tensors if id(t) in self.collected])

    def resolved(self, value: Any) -> Any:
        """The same nesting with what has come in place of what stood for it."""
        # To find is cheaper than to map, and in most nestings there is nothing.
        if not self.known or self.known.keys().isdisjoint(map(id, tensors_within(value))):
            return value
        return map_tensors(lambda one: self.known.get(id(one), one), value)

    def is_plainly_known(self, args: Iterable[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether arguments are seen at once to be of this stage; False: it takes a closer look."""
        # Of each call of a module and of each function: without a call for most arguments.
        marked = self._marked
        for one in (*args, *kwargs.values()) if kwargs else args:
            kind = type(one)
            if kind in _FLAT:
                if id(one) in marked:
                    return False
            elif kind is not tuple or not self.is_plainly_known(one, {}):
                return False
        return True

    def unknown_at(self, args: Iterable[Any]) -> tuple[int, ...] | None:
        """Positions of marked tensors among arguments; None where one of these is a nesting."""
        found = []
        for at, one in enumerate(args):
            if id(one) in self._marked:
                found.append(at)
            elif type(one) not in _FLAT:
                return None
        return tuple(found)

    def unknown_within(self, value: Any) -> list[str]:
        """Paths of the tensors in a nesting whose values are not here."""
        if not self._marked or self._marked.keys().isdisjoint(map(id, tensors_within(value))):
            return []
        found = named_tensors_within(value)
        return [path for path, one in found.items() if self.is_unknown(one)]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run a function; its results are marked where an argument is."""
        kwargs = kwargs or {}
        if self.leaks is None and self.is_plainly_known(args, kwargs):
            return func(*args, **kwargs)
        asked = self._asked_elsewhere(func, args, kwargs) if self.elsewhere else None
        result = self._run(func, args, kwargs)
        if asked is not None and isinstance(result, Tensor):
            self.elsewhere[id(result)] = asked, result
        if self.leaks is not None:
            given, made = tensors_within((args, kwargs)), tensors_within(result)
            self.note_used(given)
            self.leaks.computed(name_of(func), given, made)
        return result

    def _asked_elsewhere(self, func: Callable[..., Any], args: Any, kwargs: Any) -> str | None:
        """Name the parameter on other ranks of which an attribute is read, as `.T`.

        Raises:
            PipelineError: something is computed with one.
        """
        used = [one for one in tensors_within((args, kwargs)) if id(one) in self.elsewhere]
        name = getattr(func, "__name__", "")
        if not used or name in _FORMS or name.endswith("_like") or name.startswith("new_"):
            return None
        parameter, _ = self.elsewhere[id(used[0])]
        if name == "__get__":
            return parameter
        raise PipelineError(
            f"{name_of(func)} computes with '{parameter}' on stage {self.stage}, which does not "
            "hold it, and not by calling the module that does. If that lies outside of the blocks, "
            "let every stage hold it, as for tied weights: Pipeline(everywhere="
            f"'{parameter.rpartition('.')[0] or parameter}'); if within one, compute it there."
        )

    def _run(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        if not self._marked:
            return func(*args, **kwargs)
        given = tensors_within((args, kwargs))
        if self._marked.keys().isdisjoint(map(id, given)):
            return func(*args, **kwargs)
        if self.known:
            args, kwargs = self.resolved(args), self.resolved(kwargs)
            given = tensors_within((args, kwargs))
        name = getattr(func, "__name__", "")
        if not any(map(self.is_unknown, given)):
            self.is_touched = True
            return func(*args, **kwargs)
        # A mask decides by its values how many elements come out.
        if name in _READS or (name == "__getitem__" and self._selects_by_value(args)):
            raise PipelineError(
                f"{resolve_name(func) or name}: the model reads a value that another stage than "
                f"{self.stage} computes. Between the blocks of a pipeline it may use shapes and "
                "dtypes, not values."
            )
        result = func(*args, **kwargs)
        # `__get__` reads an attribute: shapes and dtypes are no values, and `.T` or `.data` make
        # tensors.
        self.is_touched = self.is_touched or name != "__get__" or isinstance(result, Tensor)
        self.mark(tensors_within(result))
        if args and isinstance(args[0], Tensor) and _writes(name, kwargs):
            self.mark(_written(args[0], kwargs))
        return result

    def _selects_by_value(self, args: Any) -> bool:
        return any(
            one.dtype in (torch.bool, torch.uint8) and self.is_unknown(one)
            for one in tensors_within(args[1:])
        )


def _writes(name: str, kwargs: dict[str, Any]) -> bool:
    # As torch names them: `add_` writes, `__add__` does not, `__iadd__` does. `__invert__` passes
    # for one that does, of a tensor that is marked already.
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name == "__setitem__" or name.startswith("__i") or "out" in kwargs


def _written(target: Tensor, kwargs: dict[str, Any]) -> list[Tensor]:
    # Of a view, what it is a view of as well: that is what is looked at afterwards.
    base = target._base
    return [target, *([] if base is None else [base]), *tensors_within(kwargs.get("out"))]
