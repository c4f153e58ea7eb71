"""The private hooks of torch that `consistent` needs: here and in `probes`, and nowhere else.

There are five. `DTensor._op_dispatcher._custom_op_handlers` maps an ATen overload to a function
that runs in its place, below autograd: torch's own loss-parallel and context-parallel modes use
it. `torch.distributed.tensor._api._dtensor_init_helper` makes what `rand` and `randn` return.
`torch.nn.init._no_grad_trunc_normal_`, which asks each rank for itself whether its elements are
within bounds, goes out of step on a `DTensor`. What `torch.utils.checkpoint.checkpoint` calls,
so that a region which is recomputed after the block has ended is drawn as inside of it. And
`DTensor.to_local`, which is public: what it gives does not tell that it is a shard.

Each is asked for before it is installed (`probes`): a torch that calls something else is refused.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch.distributed import tensor as torch_tensor
from torch.nn import init
from torch.utils import checkpoint as checkpoints

from vescale_rng._distributions import Normal, Uniform
from vescale_rng._draw.fill import fill_
from vescale_rng._draw.native_ops import named_arguments
from vescale_rng._draw.truncated_normal import trunc_normal_
from vescale_rng._errors import RngError
from vescale_rng._policy import policy
from vescale_rng._torch_dtensor.current_rule import decide, deciding, placing
from vescale_rng._torch_dtensor.ops import HANDLERS
from vescale_rng._torch_dtensor.probes import BORN, FRAMES, REENTRANT, TRUNCATED, missing

_BORN = {torch.rand: Uniform(), torch.randn: Normal()}
_lock = threading.Lock()
# What undoes the hooks, while there are any; and how many blocks, of all threads, need them.
_undo: list[Callable[[], None]] = []
_users = [0]
# From a function that is to be recomputed to one that is drawn as it is here and now.
Recompute = Callable[[Callable[..., Any]], Callable[..., Any]]


@contextmanager
def installed(recompute: Recompute) -> Iterator[None]:
    """Install the hooks, and restore what was there before after the last of these blocks.

    They belong to the process: blocks of several threads may end in any order.

    Args:
        recompute: what is done with functions that are to be recomputed; the same for all blocks.

    Raises:
        RngError: the installed torch has no such place.
    """
    with _lock:
        if not _users[0]:
            handlers = _handlers()  # which refuses, before anything is changed
            _undo.extend((_install(handlers), _install_checkpoints(recompute)))
        _users[0] += 1
    try:
        yield
    finally:
        with _lock:
            _users[0] -= 1
            while not _users[0] and _undo:
                _undo.pop()()


def _install_checkpoints(recompute: Recompute) -> Callable[[], None]:
    """Wrap what `checkpoint` will recompute; return what undoes it."""
    frames, reentrant = getattr(checkpoints, FRAMES), getattr(checkpoints, REENTRANT)
    stock = reentrant.apply

    def generate(function: Any, *args: Any, **kwargs: Any) -> Any:
        return frames(recompute(function), *args, **kwargs)

    class Reentrant:
        @staticmethod
        def apply(function: Any, *args: Any) -> Any:
            return stock(recompute(function), *args)

    setattr(checkpoints, FRAMES, generate)
    setattr(checkpoints, REENTRANT, Reentrant)

    def undo() -> None:
        setattr(checkpoints, FRAMES, frames)
        setattr(checkpoints, REENTRANT, reentrant)

    return undo


def _install(handlers: dict[Any, Any]) -> Callable[[], None]:
    """Install the handlers; return what removes them again."""
    api: Any = getattr(torch_tensor, "_api", None)  # `_handlers` has asked for it
    ours = {op: _handler(run) for op, run in _overloads()}
    before = {op: handlers.get(op) for op in ours}
    helper, truncated = getattr(api, BORN), getattr(init, TRUNCATED)
    to_local = torch_tensor.DTensor.to_local
    handlers.update(ours)
    setattr(api, BORN, _born(helper))
    setattr(init, TRUNCATED, _truncating(truncated))
    _replace_to_local(_telling(to_local))

    def undo() -> None:
        setattr(api, BORN, helper)
        setattr(init, TRUNCATED, truncated)
        _replace_to_local(to_local)
        for op, handler in before.items():
            if handler is None:
                handlers.pop(op, None)
            else:
                handlers[op] = handler

    return undo


def _handlers() -> dict[Any, Any]:
    """Return the table of handlers.

    Raises:
        RngError: the installed torch has none, or does not call what the other hooks replace.
    """
    dispatcher = getattr(torch_tensor.DTensor, "_op_dispatcher", None)
    handlers = getattr(dispatcher, "_custom_op_handlers", None)
    lacking = missing(FRAMES, REENTRANT, TRUNCATED, BORN)
    if not isinstance(handlers, dict):
        lacking = ("DTensor._op_dispatcher._custom_op_handlers", *lacking)
    if lacking or not isinstance(handlers, dict):
        raise RngError(
            f"torch {torch.__version__} does not call {' or '.join(lacking)} as earlier versions "
            "do: this version of vescale-rng cannot make the random numbers of its DTensor, FSDP2 "
            "and DDP consistent. Use a torch that it was tested with, or fill_, dropout and their "
            "like on the tensors"
        )
    return handlers


def _overloads() -> Iterator[tuple[Any, Callable[..., Any]]]:
    """Yield every overload of the installed torch that has a handler."""
    for name, run in HANDLERS.items():
        packet_name, overload = name.split(".")
        packet = getattr(torch.ops.aten, packet_name, None)
        # Which overloads there are differs over versions; none is needed by all of them.
        if packet is not None and overload in packet.overloads():
            yield getattr(packet, overload), run


def _handler(run: Callable[..., Any]) -> Callable[..., Any]:
    def handle(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return run(placing(), op, **named_arguments(op, args, kwargs))

    return handle


def _born(helper: Callable[..., Any]) -> Callable[..., Any]:
    def make(init_op: Any, size: Any, **kwargs: Any) -> Any:
        if init_op not in _BORN:
            return helper(init_op, size, **kwargs)
        # Asked for after the fill: a leaf with a gradient cannot be drawn into.
        requires_grad = kwargs.pop("requires_grad", False)
        made = helper(torch.empty, size, requires_grad=False, **kwargs)
        fill_(made, _BORN[init_op], placing().held_new(init_op, made))
        return made.requires_grad_() if requires_grad else made

    return make


def _replace_to_local(function: Callable[..., Any]) -> None:
    torch_tensor.DTensor.to_local = function  # type: ignore[method-assign]


def _telling(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def to_local(self: Any, *args: Any, **kwargs: Any) -> Any:
        local = stock(self, *args, **kwargs)
        # Only rules that know the data axes do something here: outside of blocks nothing is marked.
        placing().local_taken(self, local)
        return local

    return to_local


def _truncating(stock: Callable[..., Any]) -> Callable[..., Any]:
    def trunc_normal(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        # torch's loop ends when all of this rank's values are within bounds: replicated ones only.
        whole = placing().is_whole(tensor)
        if deciding() or (whole and policy() == "native"):
            with decide():
                return stock(tensor, *args, **kwargs)
        layout = None if whole else placing().held("trunc_normal_", tensor)
        with decide():
            return trunc_normal_(tensor, *args, **kwargs, layout=layout)

    return trunc_normal
