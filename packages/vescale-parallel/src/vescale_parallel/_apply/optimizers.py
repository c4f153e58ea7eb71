"""Optimizers that were made before `parallelize`: they are given the distributed parameters.

An optimizer holds parameter objects. One that went on with the plain ones would find no gradients
in them and step nothing, for ever, without an error.
"""

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from vescale_parallel._common.checksums import checksum

Distribute = Callable[[Tensor], Tensor]


def optimizers_of(model: Any) -> list[Optimizer]:
    """Return the living optimizers of the model's parameters, in an order all ranks share."""
    if not isinstance(model, nn.Module):
        return []
    # As for most models, which are parallelized before their optimizer is made.
    if not _is_held_elsewhere(model):
        return []
    wanted = {id(parameter): place for place, parameter in enumerate(model.parameters())}
    found = _living(wanted)
    if any(one.state for one in found):
        # States are compared over ranks, and an optimizer that was dropped may live on in a cycle
        # on some ranks only.
        known = [weakref.ref(one) for one in found]
        found.clear()
        gc.collect()
        found = [one for one in (ref() for ref in known) if one is not None]

    # Not in the order of the collector, which lists objects by how many collections they have lived
    # through: two of one class would change places from rank to rank, and their states, which are
    # compared and moved one after another, with them.
    def place(one: Optimizer) -> tuple[str, list[int]]:
        held = sorted(wanted[id(p)] for p in _parameters(one) if id(p) in wanted)
        return type(one).__qualname__, held

    return sorted(found, key=place)


def _is_held_elsewhere(model: nn.Module) -> bool:
    """Whether anything but its modules refers to a parameter, as an optimizer would."""
    places = Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module._parameters.values()
        if parameter is not None
    )
    parameters = list(model.parameters())
    # What is counted of an object that nothing but a list refers to, as these are counted below.
    alone = next(map(sys.getrefcount, [object()]))
    counts = map(sys.getrefcount, parameters)
    return any(
        count - alone > places[key] for count, key in zip(counts, map(id, parameters), strict=True)
    )


def _living(wanted: Container[int]) -> list[Optimizer]:
    # Torch keeps no list of optimizers. The garbage collector knows every object, millions, and
    # finds in C those that refer to one of a few, as an instance does to its class. By `type`:
    # `isinstance` would ask `__class__` of every proxy among them.
    kinds = _subclasses(Optimizer)
    found = [one for one in gc.get_referrers(*kinds) if type(one) in kinds]
    return [one for one in found if any(id(p) in wanted for p in _parameters(one))]


def _subclasses(kind: type) -> set[type]:
    """A class and all that derive from it."""
    found, rest = {kind}, [kind]
    while rest:
        new: set[type] = set(type.__subclasses__(rest.pop())) - found
        found |= new
        rest += new
    return found


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in getattr(optimizer, "param_groups", ()):
        yield from group["params"]


def state_facts(optimizers: list[Optimizer], model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield what the optimizers remember of each parameter, in words that ranks can compare."""
    for number, optimizer in enumerate(optimizers, 1):
        for name, parameter in model.named_parameters():
            # By `get`: the state is a defaultdict, and asking for an entry would make one.
            for key, value in (optimizer.state.get(parameter) or {}).items():
                # Numbers and tensors are compared; other objects may print their address.
                if isinstance(value, Tensor):
                    said = f"{tuple(value.shape)} checksum {checksum(value):08x}"
                elif isinstance(value, int | float | str | None):
                    said = repr(value)
                else:
                    said = type(value).__name__
                yield f"{type(optimizer).__name__} {number}: {name} {key}", said


def take_over(
    optimizers: list[Optimizer], made: Mapping[int, tuple[nn.Parameter, Distribute]]
) -> None:
    """Replace parameters of optimizers by new ones, in their groups and in their state.

    Args:
        optimizers: those to change, in place.
        made: by the `id` of the old parameter, the new one and how to distribute a tensor alike.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            held = group["params"]
            for position, old in enumerate(held):
                if id(old) not in made:
                    continue
                new, distribute = made[id(old)]
                # In the list, not a new list: some optimizers (LBFGS) keep the list itself.
                held[position] = new
                if old in optimizer.state:
                    optimizer.state[new] = _taken_over(optimizer.state.pop(old), old, distribute)


def _taken_over(state: Any, old: Tensor, distribute: Distribute) -> Any:
    """Return the state of a parameter, with what is as large as the parameter distributed alike.

    Whatever else it holds stays plain, which means replicated, as the optimizer itself would make
    it. A step count is plain also where the parameter is a scalar.
    """
    if not isinstance(state, dict):
        return state
    return {
        key: distribute(value)
        if isinstance(value, Tensor) and value.shape == old.shape and key != "step"
        else value
        for key, value in state.items()
    }
