"""The modules and parameters of a model, walked once in a step."""

from __future__ import annotations

import zlib
from collections.abc import Container, Mapping
from itertools import chain
from operator import is_
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from vescale_dtensor import DTensor
from vescale_dtensor.storage import local_leaves

from vescale_parallel._common.messages import listed
from vescale_parallel._common.torch_compat import any_hooks, hooks_of
from vescale_parallel._errors import PipelineError
from vescale_parallel._zero.schedule import zero_schedule_of

_DROPOUTS: Final = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)


class TrainedParameters(NamedTuple):
    """The parameters that are trained, in the order of the model.

    Attributes:
        parameters: they.
        leaves: the local tensor of each.
    """

    parameters: list[nn.Parameter]
    leaves: list[Tensor]

    def without(self) -> list[nn.Parameter]:
        """Those whose local tensors have no gradients."""
        pairs = zip(self.parameters, self.leaves, strict=True)
        return [one for one, leaf in pairs if leaf.grad is None]


class ModelWalk(NamedTuple):
    """The modules and parameters of a model, walked once in a step: there are thousands.

    Attributes:
        training: whether each module is in train mode.
        named: each parameter once, by its first name, in the order of `named_parameters`.
        leaves: the local tensor of each, in that order.
        flags: what models of Hugging Face are asked for by their configuration, beside arguments.
        is_compiled: whether torch.compile runs the model, or a module of it.
        form: stands for the names and types of the modules.
        drops: which modules of torch for dropout draw, as far as that is up to `p`.
        late: names of parameters that came after a model was divided; not in `named`.
    """

    training: tuple[bool, ...]
    named: dict[str, nn.Parameter]
    leaves: tuple[Tensor, ...]
    flags: tuple[str, ...] = ()
    is_compiled: bool = False
    form: int = 0
    drops: tuple[bool, ...] = ()
    late: tuple[str, ...] = ()

    def refuse_late(self) -> None:
        """Refuse parameters that came late. Of ranks that have compared them: all have the same.

        Raises:
            PipelineError: no stage is known to be theirs.
        """
        if self.late:
            raise PipelineError(
                f"{listed(self.late)} came after parallelize: no stage is known for them. Replace "
                "modules and parameters before parallelize, or write values into those that are "
                "there: p.copy_(values) under torch.no_grad()."
            )

    def trained(self) -> TrainedParameters:
        """The parameters that get gradients."""
        if all([leaf.requires_grad for leaf in self.leaves]):  # as mostly
            return TrainedParameters(list(self.named.values()), list(self.leaves))
        pairs = zip(self.named.values(), self.leaves, strict=True)
        found = [(one, leaf) for one, leaf in pairs if leaf.requires_grad]
        return TrainedParameters([one for one, _ in found], [leaf for _, leaf in found])

    def hooked(self) -> list[str]:
        """Names of parameters on which somebody has registered hooks."""
        if not any_hooks(self.leaves):
            return []
        return [n for n, leaf in zip(self.named, self.leaves, strict=True) if hooks_of(leaf)]

    def modes(self, device: str) -> tuple[object, ...]:
        """What decides beside shapes what a model draws, in which dtypes, where gradients go."""
        trained = tuple([leaf.requires_grad for leaf in self.leaves])
        cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        # A trial run under inference_mode sees nothing that needs a gradient.
        inference = torch.is_inference_mode_enabled()
        return self.training, trained, cast, inference, self.flags, self.form, self.drops

    def gradients(self) -> str:
        """Which parameters have gradients by now, the same on all ranks.

        Not asked of the parameters themselves, which would make a wrapper for each.
        """
        bits = bytes([leaf.grad is not None for leaf in self.leaves])
        return f"{sum(bits)} of {len(bits)}, digest {zlib.crc32(bits):08x}"


class Walker:
    """Walks through a model, once in each step.

    Where its modules hold what they held, they are looked at all at once: to go from one to the
    next in Python takes ten times as long, for nothing new.

    Args:
        model: with distributed parameters.
        known: names of parameters of which it is known where they are.
    """

    def __init__(self, model: nn.Module, known: Container[str]) -> None:
        self._model, self._known = model, known
        self._found: _Tree | None = None
        self._modules: list[nn.Module] = []

    def hooks(self) -> list[int]:
        """How many forward hooks each module has now, of those that the latest walk has found."""
        return [len(one._forward_hooks) for one in self._modules]

    def walk(self) -> ModelWalk:
        """Return what the model has now."""
        model, found = self._model, self._found
        stored = _stored_beside(model)
        if found is None or stored or not found.is_current():
            found = _Tree.of(model, stored)
            found.put_aside(self._known)
            # What is stored elsewhere is not what modules hold, by which the next step looks.
            self._found = None if stored else found
        modules = self._modules = found.modules
        return ModelWalk(
            # Of lists: a generator would be entered anew for each of thousands.
            tuple([one.training for one in modules]),
            found.named,
            tuple(local_leaves(found.named.values())),
            _flags_of(model),
            found.is_compiled or any([m._compiled_call_impl is not None for m in modules]),
            found.form,
            # Elsewhere all is kept, or none, and nothing drawn.
            tuple([0 < one.p < 1 for one in found.dropouts]),
            found.late,
        )


class _Tree:
    """The modules and parameters of a model.

    Args:
        modules: each once, in the order of `named_modules`.
        named: each parameter once, by its first name, in the order of `named_parameters`.

    Attributes:
        is_compiled: whether torch.compile has put a module around one of them.
        form: stands for their names and types: one that has taken another's place may draw, and
            pass on, other things.
        dropouts: those of torch.
        late: names of parameters of which it is not known where they are.
    """

    def __init__(self, modules: list[nn.Module], named: dict[str, nn.Parameter]) -> None:
        self.modules, self.named = modules, named
        self._parameters = _TableContents([one._parameters for one in modules])
        below = [one._modules for one in modules]
        self._below = _TableContents(below)
        self.is_compiled = any(["_orig_mod" in one for one in below])  # what torch.compile returns
        # The names of what each module has are in it: modules in another order are another model.
        names = [(type(one).__qualname__, *one._modules) for one in modules]
        self.form = zlib.crc32(repr(names).encode())
        self.dropouts: list[Any] = [one for one in modules if isinstance(one, _DROPOUTS)]
        self.late: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: nn.Module, stored: Mapping[tuple[int, str], Any]) -> _Tree:
        """Walk through a model."""
        named: dict[str, nn.Parameter] = {}
        modules: list[nn.Module] = []
        seen, walked = set(), set()
        # `named_modules` by hand, in its order: its generators would be half of all calls.
        left: list[tuple[str, nn.Module]] = [("", model)]
        while left:
            prefix, module = left.pop()
            if id(module) in walked:
                continue
            walked.add(id(module))
            modules.append(module)
            for name, held in module._parameters.items():
                one = stored.get((id(module), name), held) if stored else held
                if one is not None and id(one) not in seen:
                    seen.add(id(one))
                    named[prefix + name] = one
            below = reversed(module._modules.items())
            left += [(f"{prefix}{n}.", m) for n, m in below if m is not None]
        return cls(modules, named)

    def put_aside(self, known: Container[str]) -> None:
        """Leave parameters out that came after a model was divided."""
        late = [n for n, p in self.named.items() if n not in known or not isinstance(p, DTensor)]
        self.late = tuple(late)
        for name in late:
            del self.named[name]

    def is_current(self) -> bool:
        """Whether all modules hold what they held."""
        return self._below.are([one._modules for one in self.modules]) and self._parameters.are(
            [one._parameters for one in self.modules]
        )


class _TableContents:
    """What a list of tables held: their sizes, names and values."""

    def __init__(self, tables: list[dict[str, Any]]) -> None:
        self._sizes = list(map(len, tables))
        self._names = list(chain.from_iterable(tables))
        self._values = list(chain.from_iterable(map(dict.values, tables)))

    def are(self, tables: list[dict[str, Any]]) -> bool:
        """Whether tables hold the same, by identity."""
        # By `map`: without a line of Python for each module and parameter.
        return (
            list(map(len, tables)) == self._sizes
            and list(chain.from_iterable(tables)) == self._names
            and all(map(is_, chain.from_iterable(map(dict.values, tables)), self._values))
        )


def _stored_beside(model: nn.Module) -> dict[tuple[int, str], Any]:
    """The stored parameters, by module and name, where modules hold gathered ones.

    In a forward of the model itself zero has gathered what its first unit holds on this rank, and
    ranks of other stages hold others.
    """
    zero = zero_schedule_of(model)
    units = () if zero is None else zero.units
    held = [one for unit in units if unit.is_swapped for one in unit.held]
    return {(id(module), name): one.stored for one in held for module, name in one.places}


def _flags_of(model: nn.Module) -> tuple[str, ...]:
    """Which results are asked for: a loss of routers is, by `config.output_router_logits`."""
    words = getattr(getattr(model, "config", None), "__dict__", {})
    return tuple([f"{k}={v}" for k, v in words.items() if str(k).lstrip("_").startswith("output_")])
