"""Draws that a block has made before: a training step drops the same shapes again and again.

What a dropout costs beside torch's own is what is found out about it: whose rows these are, and
how many words of the stream lie before and after them. Where the user said how many rows each rank
has (`rows`), the answer for a shape never changes, and is looked up.
"""

from typing import Any

import torch

from vescale_rng._cpu.fill import ways_around
from vescale_rng._cpu.stream import advance
from vescale_rng._distributions import Bernoulli
from vescale_rng._layout.fill_plan import plan_for
from vescale_rng._layout.layout import ShardLayout
from vescale_rng._policy import policy
from vescale_rng._torch_dtensor.current_rule import batch_dim_inside
from vescale_rng._torch_dtensor.parameters import is_parameter

# What `F.dropout` draws its noise by on CPU.
KNOWN_OP: Any = torch.ops.aten.bernoulli_.float

# More shapes than that have no pattern; each is some hundred bytes.
_MOST = 1024


class KnownDraws:
    """The words around this rank's rows, by what is drawn into.

    It must be asked only where no rank has to be: a rank that knows a draw sends nothing.
    """

    def __init__(self) -> None:
        self._ways: dict[Any, tuple[int, int]] = {}

    def draw(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        """Draw as before, or return None where that is not known: nothing is drawn then."""
        key = _key(args, kwargs)
        ways = self._ways.get(key)
        if ways is None or is_parameter(args[0]):
            return None
        # Below autograd, as `fill_` writes: an alias without a graph, and the caller's own tensor
        # as the result.
        noise: torch.Tensor = args[0].detach()
        before, after = ways
        advance(before, torch.default_generator)
        noise.bernoulli_(args[1], generator=torch.default_generator)
        advance(after, torch.default_generator)
        return args[0]  # type: ignore[no-any-return]

    def remember(self, args: tuple[Any, ...], kwargs: dict[str, Any], layout: ShardLayout) -> None:
        """Keep how the numbers of `layout` were drawn, where they lie in one range of memory."""
        key = _key(args, kwargs)
        if key is None:
            return
        noise = args[0].detach()
        ways = ways_around(plan_for(layout, noise), Bernoulli(args[1]), noise)
        if ways is not None:
            if len(self._ways) >= _MOST:
                self._ways.clear()
            self._ways[key] = ways


def can_be_known(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether a draw is of the kind that is kept: of rows in a plain tensor on CPU."""
    return _key(args, kwargs) is not None and not is_parameter(args[0])


def _key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return all that the words around a draw depend on, or None where they are not kept."""
    if kwargs or len(args) != 2 or type(args[0]) is not torch.Tensor:
        return None
    noise, p = args
    if not noise.is_cpu or policy() != "native":
        return None
    return p, noise.shape, noise.stride(), noise.dtype, batch_dim_inside()
