"""Generators that samplers hold of their own: where they stand belongs to where a loader is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler
from vescale_comm.generators import generators_of

from vescale_parallel._common.messages import listed
from vescale_parallel._errors import PlanError


class SamplerGenerators:
    """The generators of a sampler, or batch sampler, and of samplers that it holds.

    Args:
        sampler: of the loader; None: it has none.
        others: generators that somebody else looks after.
    """

    def __init__(self, sampler: Any, *others: torch.Generator | None) -> None:
        self._held = _held_by(sampler)
        self._kept = {
            name: one
            for name, one in self._held.items()
            if isinstance(one, torch.Generator) and all(one is not other for other in others)
        }

    def states(self) -> dict[str, Tensor]:
        """Return where those of torch stand, by name."""
        return {name: one.get_state() for name, one in self._kept.items()}

    def put(self, states: Mapping[str, Tensor]) -> None:
        """Let them stand there.

        Raises:
            PlanError: these are states of other generators.
        """
        if states.keys() != self._kept.keys():
            raise PlanError(
                f"loader: the state has generators of the sampler {listed(states) or 'none'}, and "
                f"the sampler here has {listed(self._kept) or 'none'}: it would give other samples "
                "from here on. Resume with the sampler with which the state was saved."
            )
        for name, one in self._kept.items():
            one.set_state(states[name])

    def require_kept(self) -> None:
        """Refuse to tell where a loader is whose sampler draws by what is not kept.

        Raises:
            PlanError: it holds generators that are not torch's.
        """
        lost = {
            name: type(one).__name__
            for name, one in self._held.items()
            if not isinstance(one, torch.Generator)
        }
        if lost:
            raise PlanError(
                f"loader: the sampler draws by {listed([f'{n} ({k})' for n, k in lost.items()])}, "
                "and a resumed run would have other samples. Let it hold a torch.Generator, whose "
                "state is kept, or make its generator anew in each epoch, from a seed."
            )


def _held_by(sampler: Any) -> dict[str, Any]:
    found, left = dict[str, Any](), [("", sampler)]
    seen = set[int]()
    while left:
        path, one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        found |= {f"{path}{name}": generator for name, generator in generators_of(one).items()}
        left += [
            (f"{path}{name}.", value)
            for name, value in getattr(one, "__dict__", {}).items()
            if isinstance(value, Sampler) or name in ("sampler", "batch_sampler")
        ]
    return found
