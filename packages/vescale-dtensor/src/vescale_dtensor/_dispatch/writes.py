"""Finds which operands a call writes to: by its schema, by its name, or by looking at them.

The fallback runs a call on gathered copies, so a write that it does not know of is lost. Autograd's
version counters show most writes, but not those that third-party kernels do below them
(`p.data.sub_`, C++ with `data_ptr()`). Registered operators state what they write. For a function
that states nothing, the copies are compared with what they were before the call; so they are for
operators of other libraries that state no write, as torch would not notice if that were untrue.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._planning.op_call import OpCall
from vescale_dtensor._tensor.copied_views import same_memory
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._torch.compat import no_torch_function, overloads_of
from vescale_dtensor._torch.schemas import signatures, written_operands


def foretold_writes(call: OpCall) -> set[int]:
    """Indices of the operands that a call will write to, as far as is known before it runs."""
    stated = written_operands(call.func, call.args, call.kwargs) or set()
    return stated | _written_by_name(call) | _statistics(call)


class WriteWatch:
    """Records the state of operands before a call, to find afterwards which it has changed."""

    def __init__(self, call: OpCall, locals_: list[Tensor]) -> None:
        """Store versions, and copies of gathered operands if the function states nothing.

        Args:
            call: the parsed call.
            locals_: the local tensor of each operand. Copies need their memory once more.
        """
        self._locals = locals_
        self._registered = bool(overloads_of(call.func))
        self._versions = [_version(local) for local in locals_]
        self._copies: dict[int, Tensor] = {}
        if not _is_described(call.func):
            # Not of operands that the call gets themselves: a write to them needs no copying back.
            pairs = zip(call.operands, locals_, strict=True)
            with self._unseen():
                self._copies = {
                    i: _bits(x).clone() for i, (o, x) in enumerate(pairs) if _gathered(o, x)
                }

    def _unseen(self) -> AbstractContextManager[Any]:
        # A recording refuses what reads values. An operator mostly writes nothing; then nothing of
        # the comparison concerns it. A Python function may write another time.
        return no_torch_function() if self._registered else nullcontext()

    def changed(self) -> set[int]:
        """Indices of the operands that have changed.

        The same on every rank, since all ranks ran the op on equal, replicated tensors. Writing
        back communicates, so it must be.
        """
        counted = {i for i, x in enumerate(self._locals) if _version(x) != self._versions[i]}
        with self._unseen():
            pairs = [(i, bits, _bits(self._locals[i])) for i, bits in self._copies.items()]
            different = {i for i, before, after in pairs if not torch.equal(before, after)}
        if different:
            # Seen: a replay would leave out a call whose schema states no write.
            different = {i for i, before, after in pairs if not torch.equal(before, after)}
        return counted | different


def _is_described(func: Any) -> bool:
    """Whether a function's writes are known or counted: its schema states some, or it is torch's.

    Torch calls an operator of another library whose schema states no write, although it writes.
    """
    if registered := overloads_of(func):
        ours = all(schema.name.split("::", 1)[0] in _OF_TORCH for schema in registered)
        return ours or any(signature.written for signature in signatures(func))
    module = str(getattr(func, "__module__", "") or "torch")
    return bool(signatures(func)) or module.split(".", 1)[0] == "torch"


# Namespaces whose schemas are tested by torch.
_OF_TORCH = frozenset({"aten", "prims", "quantized"})


def _gathered(operand: Tensor, local: Tensor) -> bool:
    """Whether the call gets a copy of the operand, so that a write to it has to be copied back."""
    if not isinstance(operand, DTensor) or local.layout is not torch.strided:
        return False
    # What has no values cannot be compared: meta and fake tensors.
    if local.is_meta or type(local) not in (Tensor, torch.nn.Parameter):
        return False
    return not same_memory(operand._local_tensor, local)


# Size of an element -> an integer dtype of that size.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: Tensor) -> Tensor:
    """The same memory as integers, since as floats NaN differs from itself and -0.0 equals 0.0."""
    data = tensor.detach()
    if data.is_complex():
        data = torch.view_as_real(data.resolve_conj())
    return data.resolve_neg().view(_WORDS[data.element_size()])


def _version(local: Tensor) -> int:
    # Inference tensors have no version counter, and reading it raises.
    return 0 if local.is_inference() else local._version


def _written_by_name(call: OpCall) -> set[int]:
    """Indices of the operands that the function's name says it changes in place."""
    if not _named_in_place(call.func):
        return set()
    return set(range(len(call.operands))) if _takes_lists(call) else {0}


# Functions that update running statistics -> position of the mean; the variance is the next one.
# Neither their schemas nor version counters show it.
_STATISTICS = {
    torch.nn.functional.batch_norm: 1,
    torch.nn.functional.instance_norm: 1,
    torch.ops.aten._batch_norm_with_update: 3,
    torch.ops.aten._batch_norm_with_update.default: 3,
    **{
        getattr(torch, name): 3
        for name in (
            "batch_norm",
            "instance_norm",
            "native_batch_norm",
            "_native_batch_norm_legit",
            "_batch_norm_impl_index",
            "cudnn_batch_norm",
            "miopen_batch_norm",
        )
    },
}


def _statistics(call: OpCall) -> set[int]:
    """Indices of the running statistics among the operands of a normalization."""
    place = _STATISTICS.get(call.func)
    if place is None:
        return set()
    named = (call.argument(place, "running_mean"), call.argument(place + 1, "running_var"))
    return {i for i, o in enumerate(call.operands) if any(o is given for given in named)}


def _named_in_place(func: Any) -> bool:
    # torch's convention: `add_`. Dunder methods end in underscores as well.
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _takes_lists(call: OpCall) -> bool:
    return bool(call.args) and isinstance(call.args[0], list | tuple)
