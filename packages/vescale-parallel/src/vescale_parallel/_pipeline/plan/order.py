"""In which order a forward uses blocks and what lies around them, found on the meta device.

The order in which a model registers its modules says mostly where they are used, and not always: a
norm that `__init__` makes before the blocks may be called behind them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from vescale_comm.generators import States, generators_of
from vescale_comm.nested import map_tensors, named_tensors_within

from vescale_parallel._errors import PlanError

_MOST_ANSWERS: Final = 1000
"""How often a forward may ask for values that are not there: a loop may wait for another one."""


class Use(NamedTuple):
    """Where a module outside of the blocks is used.

    Attributes:
        behind: the latest block then, each time; "": before the first one.
        is_taken: whether code takes a parameter of it by itself, and does not call the module:
            code around blocks runs on every stage that comes so far.
    """

    behind: tuple[str, ...]
    is_taken: bool = False


class Order(NamedTuple):
    """What a forward has done; nothing where it is not known.

    Attributes:
        blocks: in the order of their first calls.
        uses: by name of a module outside of them, of those that are used.
    """

    blocks: list[str]
    uses: dict[str, Use]


def order_of_use(
    model: nn.Module, blocks: Sequence[str], around: Sequence[str], inputs: Any = None
) -> Order:
    """Call a copy of a model without values, in eval mode and without hooks, and look at it.

    Args:
        model: on any device; nothing of it changes.
        blocks: names of its blocks.
        around: names of modules outside of them.
        inputs: arguments of a call: a mapping by name, a tuple, or one tensor. None: the model's
            `dummy_inputs`, as those of Hugging Face have; without them, and where the model does
            not run on them, nothing is known.

    Raises:
        PlanError: the model does not run on the `inputs` that were given.
    """
    given = inputs
    if given is None:
        with suppress(Exception):  # a property of other people's
            given = getattr(model, "dummy_inputs", None)
    if given is None:
        return Order([], {})
    states, problem = States(generators_of(model)), None
    # Masks are asked whether they are true everywhere, and bad values whether there are any.
    for answer in (True, False):
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                return _MetaForward(model, blocks, around, answer=answer).run(given)
        except Exception as error:  # whatever its code raises at tensors without values
            problem = problem or error
        finally:
            states.restore()
    if inputs is None:
        return Order([], {})
    raise PlanError(
        f"pipeline: {type(model).__name__} does not run on inputs= on the meta device: "
        f"{type(problem).__name__}: {str(problem)[:200]}. Leave them out, or pass others."
    ) from problem


class _MetaForward(TorchFunctionMode):
    """A call of a model on the meta device; `answer`: what it gets where it asks for values."""

    def __init__(
        self, model: nn.Module, blocks: Sequence[str], around: Sequence[str], *, answer: bool
    ) -> None:
        super().__init__()
        self._answer = answer
        self._model = _without_values(model)
        self._blocks: dict[str, None] = {}
        self._uses: dict[str, Use] = {}
        self._behind, self._answers = "", 0
        # Of modules around the blocks: those that are called now, and by parameter its holders.
        self._called: list[str] = []
        self._holders: dict[int, list[str]] = {}
        for name in blocks:
            module = self._model.get_submodule(name)
            module.forward = _ReportingForward(name, module.forward, self._block)
        for name in around:
            module = self._model.get_submodule(name)
            module.forward = _ReportingForward(name, module.forward, self._module)
            for one in module.parameters(recurse=False):
                self._holders.setdefault(id(one), []).append(name)

    def run(self, given: Any) -> Order:
        """Call it; returns what was seen."""
        args, kwargs = _arguments(map_tensors(_empty, given))
        with torch.device("meta"), self:
            self._model(*args, **kwargs)
        return Order([*self._blocks], self._uses)

    def _block(self, name: str, forward: Any, args: Any, kwargs: Any) -> Any:
        self._behind = name
        self._blocks.setdefault(name)
        try:
            return forward(*args, **kwargs)
        except Exception:
            # Experts choose rows by values. Mostly a block returns what is like its argument.
            given = list(named_tensors_within((args, kwargs)).values())
            if not given:
                raise
            return given[0]

    def _module(self, name: str, forward: Any, args: Any, kwargs: Any) -> Any:
        self._note(name, is_taken=False)
        self._called.append(name)
        try:
            return forward(*args, **kwargs)
        finally:
            self._called.pop()

    def _note(self, name: str, *, is_taken: bool) -> None:
        known = self._uses.get(name, Use(()))
        behind = dict.fromkeys((*known.behind, self._behind))
        self._uses[name] = Use(tuple(behind), known.is_taken or is_taken)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer what is asked of values; note parameters that are taken."""
        if func in (Tensor.__bool__, Tensor.__contains__, Tensor.item):
            self._answers += 1
            if self._answers > _MOST_ANSWERS:
                raise PlanError("it asks for values without end")
            if func is not Tensor.item:
                # As of ids that are asked for padding, where masks are asked whether all is shown.
                return self._answer is (func is Tensor.__bool__)
            return torch.full((), self._answer, dtype=args[0].dtype, device="cpu").item()
        # Dtypes and shapes are asked for everywhere; only values have to be there.
        if func.__name__ != "__get__":
            for one in (*args, *(kwargs or {}).values()):
                holders = self._holders.get(id(one), ())
                if holders and not any(name in self._called for name in holders):
                    self._note(holders[0], is_taken=True)
        return func(*args, **(kwargs or {}))


class _ReportingForward:
    """A forward that tells of its calls."""

    def __init__(self, name: str, forward: Any, tell: Any) -> None:
        self.name, self.forward, self.tell = name, forward, tell

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.tell(self.name, self.forward, args, kwargs)


def _without_values(model: nn.Module) -> nn.Module:
    """A copy on the meta device, in eval mode, without hooks."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers, vars(module)):
            memo |= {id(one): _empty(one) for one in held.values() if isinstance(one, Tensor)}
    copied = copy.deepcopy(model, memo).eval()
    for module in copied.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            hooks.clear()
    return copied


def _empty(tensor: Tensor) -> Tensor:
    # Not `empty_like`: a deferred tensor would note it.
    made = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta")
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(made, requires_grad=False) if is_parameter else made


def _arguments(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(given, Mapping):
        return (), dict(given)
    return (tuple(given) if isinstance(given, tuple | list) else (given,)), {}
