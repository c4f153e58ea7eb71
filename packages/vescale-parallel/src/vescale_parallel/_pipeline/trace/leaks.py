"""Values that get out of a block by another way than its result: other stages would not have them.

Hooks on modules inside of a block, and attributes in which it leaves something, bring values to
code outside of it, as Hugging Face's models collect the logits of their routers. On a stage that
stands in for the block nothing of that happens, so a loss of them would be that of some blocks.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from vescale_parallel._pipeline.trace.hook_results import MissingInnerResult
from vescale_parallel._zero.saved_tensors import is_checkpointed_now


class Leaks:
    """Watches one forward of a stage.

    Attributes:
        inside: the block that runs, if any.
        recomputes: whether a function ran whose tensors backward computes again.
        taken: the `id` of each tensor that a function took, other than to ask for its shape.
    """

    def __init__(self) -> None:
        self.inside: str | None = None
        self.recomputes = False
        self.taken: set[int] = set()
        # Weak, as memory of activations shall go as it goes without being watched; the object is
        # compared, as an `id` names another one later.
        self._made: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        # Of these, what hooks bring to code outside of the blocks on other stages, too.
        self._given_out: set[int] = set()

    def is_made(self, tensor: Tensor) -> bool:
        """Whether a tensor was computed in the block that runs."""
        made, block = self._made.get(id(tensor), (None, ""))
        return made is not None and made() is tensor and block == self.inside

    def give_out(self, tensors: Iterable[Tensor]) -> None:
        """What the block that runs has made, and other stages have placeholders for."""
        self._given_out.update(map(id, tensors))

    def left_block(self, tensors: Iterable[Tensor]) -> list[str]:
        """Blocks that made tensors which they did not return, and which have no placeholders."""
        found = [(one, *self._made.get(id(one), (None, ""))) for one in tensors]
        return [
            block
            for one, made, block in found
            if made is not None and made() is one and id(one) not in self._given_out
        ]

    def returned(self, tensors: Iterable[Tensor]) -> None:
        """The block has ended, and returns these."""
        self.inside = None
        for one in tensors:
            self._made.pop(id(one), None)

    def computed(self, name: str, given: list[Tensor], found: list[Tensor]) -> None:
        """A function has made tensors of others.

        Raises:
            Lacking: outside of a block, of one that was made in a block and not returned.
        """
        self.recomputes = self.recomputes or is_checkpointed_now()
        if found or name != "__get__":
            self.taken.update(map(id, given))
        new = [one for one in found if not any(one is other for other in given)]
        if self.inside is not None:
            # An `id` of a tensor that is gone may be that of a new one.
            self._given_out.difference_update(map(id, new))
            self._made |= {id(one): (weakref.ref(one), self.inside) for one in new}
            return
        for block in self.left_block(given) if new else ():
            raise MissingInnerResult(
                f"{name}, outside of the blocks, takes a value that was computed in '{block}' and "
                "is not what that returns: an attribute brought it there, or a hook that other "
                "stages do not have. Blocks of other stages do not run here, so their part would "
                "be missing without a word. Let the block return it, or leave it out."
            )


def name_of(function: Any) -> str:
    """Return what to call a function in a message."""
    return str(getattr(function, "__name__", function))
