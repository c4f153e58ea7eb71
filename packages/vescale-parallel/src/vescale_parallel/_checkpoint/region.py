"""One module whose forward is computed again in backward, bitwise the same.

The random numbers are: torch restores its generators, by which vescale-rng draws, and those of
Python, of numpy and of the module are restored beside them. Buffers that forward writes to are as
they were for a recomputation, and untouched by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from vescale_comm.generators import States, generators_of
from vescale_comm.nested import map_tensors, tensors_within
from vescale_dtensor import attention_way, checkpoint, sequence_attention, untraced
from vescale_rng import policy, use

from vescale_parallel._checkpoint.saved_results import Results
from vescale_parallel._common.forward_counters import Counts, Places, places_of
from vescale_parallel._common.pickle_refusal import NotPickled
from vescale_parallel._common.value_changes import CHECKED, SMALL, Before
from vescale_parallel._errors import ParallelError


class Region(NotPickled):
    """What a module has for its `forward`.

    Hooks of the module run around it, once: also those by which its parameters are gathered.

    Args:
        name: of the module, for messages.
        module: the module.
        saved: operators whose results are kept.
        device_type: of the mesh; the state of that generator is kept as well.

    Attributes:
        before_again: called before each recomputation, as by what gathers parameters.
    """

    def __init__(
        self, name: str, module: nn.Module, saved: Sequence[str], device_type: str
    ) -> None:
        self.name, self.module, self.saved = name, module, tuple(saved)
        self.device_type = device_type
        self.is_on = True
        self.before_again: Callable[[], None] | None = None
        self._calls = 0
        self._generators: dict[str, Any] = {}
        self._counted: Places = {}
        # One that somebody has set before, as accelerate does.
        self._own: Any = vars(module).get("forward")

    def __deepcopy__(self, memo: dict[int, Any]) -> Region:
        """That of the copied module."""
        copied = Region.__new__(Region)
        memo[id(self)] = copied
        vars(copied).update(vars(self))
        copied.module, copied._own = deepcopy(self.module, memo), deepcopy(self._own, memo)
        copied.before_again = deepcopy(self.before_again, memo)
        # The copy has generators and attributes of its own.
        copied._calls, copied._generators, copied._counted = 0, {}, {}
        return copied

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The forward that is recomputed; `inspect.signature` asks for it."""
        bound: Callable[..., Any] = type(self.module).forward.__get__(self.module)
        return bound if self._own is None else self._own

    @untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward, and keep what it takes to run it again."""
        if not (self.is_on and torch.is_grad_enabled()):
            return self.__wrapped__(*args, **kwargs)
        self._require_no_cache(args, kwargs)
        given = (args, kwargs)
        tensors = tensors_within(given)
        # Asked now: what comes back for the recomputation has no history any more.
        leaves = [one.is_leaf for one in tensors]
        # Tensors are arguments of their own, so that torch notices when one is written to in
        # between; what is around them must not keep them alive.
        hollow = map_tensors(lambda _: _HOLLOW, given, copies=True)
        # Forward gets the caller's own lists, to which it may append; the recomputation gets copies
        # from before, so that it finds what forward found, and appends nothing a second time.
        first = [given]
        del given, args, kwargs
        forward = self.__wrapped__

        def run(_: Tensor, *tensors: Tensor) -> Any:
            if first:
                # Popped: the caller's lists, and the tensors in them, must not be held until the
                # backward.
                own_args, own_kwargs = first.pop()
                return forward(*own_args, **own_kwargs)
            if self.before_again is not None:
                self.before_again()
            # What torch passes are leaves. Results, as they were, are what a captured forward has
            # its program for, and what may be written to.
            pairs = zip(tensors, leaves, strict=True)
            rest = iter([one if leaf else one.view(one.shape) for one, leaf in pairs])
            inner_args, inner_kwargs = map_tensors(lambda _: next(rest), hollow, copies=True)
            with buffers.as_before(), drawn.again(), counts.again():
                return forward(*inner_args, **inner_kwargs)

        # Before the forward, which may write to them. `run` finds this name when it is called.
        self._calls += 1
        buffers = _Buffers(self.name, self.module, copies=self._calls <= CHECKED)
        if self._calls <= CHECKED:
            # Not each time: all attributes of all modules are looked at.
            self._generators = generators_of(self.module)
        drawn = _GeneratorStates(self._generators)
        looks = self._calls <= CHECKED
        counts = Counts(places_of(self.module) if looks else self._counted)
        # An argument on the device, whatever the others are: torch asks arguments for devices.
        here = torch.empty(0, device=self.device_type)
        contexts = partial(_contexts, self.saved)  # of no call: what captures this asks it anew
        output = checkpoint(run, here, *tensors, context_fn=contexts)
        buffers.require_unwritten()
        drawn.end()
        if looks:
            self._counted |= counts.changed()
            counts = counts.of(self._counted)
        return output

    def _require_no_cache(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for one in (*args, *kwargs.values()):
            if hasattr(one, "get_seq_length") and hasattr(one, "update"):
                raise ParallelError(
                    f"checkpoint: module '{self.name}' is given a {type(one).__name__}, which its "
                    "recomputation would fill a second time. Call the model with use_cache=False."
                )


_HOLLOW: Final = torch.empty(0, device="cpu")


def _is_same(before: Tensor, now: Tensor | None) -> bool:
    """Whether a buffer has its value still, as far as that is known without waiting for a device.

    Versions do not tell: torch's batch norm writes to running statistics without counting.
    """
    if now is None or before.device.type != "cpu" or now.device.type != "cpu":
        return False
    return before.dtype == now.dtype and torch.equal(before, now)


def _contexts(
    saved: Sequence[str],
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """For a forward, and for its recomputations."""
    results = Results(saved) if saved else None
    return (nullcontext() if results is None else results.keep()), _RecomputationContext(results)


class _RecomputationContext:
    """Entered for each recomputation, which runs in the blocks in which the forward ran."""

    def __init__(self, results: Results | None) -> None:
        self._results = results
        # Backward is called outside of them, and perhaps in a thread that knows of none.
        self._policy, self._way = policy(), attention_way()
        self._open: list[ExitStack] = []

    def __enter__(self) -> None:
        stack = ExitStack()
        stack.enter_context(use(self._policy))
        stack.enter_context(sequence_attention(self._way))
        if self._results is not None:
            stack.enter_context(self._results.give())
        self._open.append(stack)

    def __exit__(self, *raised: Any) -> Any:
        return self._open.pop().__exit__(*raised)


class _GeneratorStates:
    """Generators that torch does not set back for a recomputation, as they are before a forward."""

    def __init__(self, own: dict[str, Any]) -> None:
        self._own = own
        self._before: States | None = States(own)

    def end(self) -> None:
        """The forward has run: states of which it drew nothing are released."""
        if self._before is not None and not self._before.moved():
            self._before = None

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draw what the forward has drawn; afterwards they stand where they stood."""
        if self._before is None:
            yield
            return
        now = States(self._own)
        self._before.restore()
        try:
            yield
        finally:
            now.restore()


class _Buffers:
    """The buffers of a module as they are before its forward."""

    def __init__(self, region: str, module: nn.Module, *, copies: bool) -> None:
        self._region = region
        places = [
            (one, name, buffer)
            for one in module.modules()
            for name, buffer in one._buffers.items()
            if buffer is not None
        ]
        self._small = [
            (one, name, buffer.detach().clone())
            for one, name, buffer in places
            if buffer.numel() <= SMALL or isinstance(one, _NormBase)
        ]
        self._large = [
            (one, name, buffer, Before(buffer, copies=copies))
            for one, name, buffer in places
            if buffer.numel() > SMALL and not isinstance(one, _NormBase)
        ]

    def require_unwritten(self) -> None:
        """Refuse a forward that has written to a large buffer.

        Raises:
            ParallelError: it would be written to again.
        """
        for module, name, buffer, before in self._large:
            if before.has_changed(module._buffers.get(name)):
                raise ParallelError(
                    f"checkpoint: module '{self._region}' writes to its buffer '{name}' of shape "
                    f"{tuple(buffer.shape)}, and would again when it is recomputed. Give it 'none' "
                    "in the plan's checkpoint rules."
                )
        # Compared, and let go: what recomputes keeps this object until the backward.
        self._large = []

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Let the modules hold copies of what was there; afterwards they hold what they held."""
        here = [
            (module, name, value, module._buffers.get(name)) for module, name, value in self._small
        ]
        changed = [one for one in here if not _is_same(one[2], one[3])]
        held = [(module, name, buffer) for module, name, _, buffer in changed]
        for module, name, value, _ in changed:
            # A clone each time: a recomputation writes to it, and there may be another one.
            module._buffers[name] = value.clone()
        try:
            yield
        finally:
            for module, name, buffer in held:
                module._buffers[name] = buffer
