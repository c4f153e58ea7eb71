"""Raises where something that `parallelize` puts into a model would be pickled."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, NoReturn

from vescale_parallel._errors import ParallelError


class NotPickled:
    """A hook, or what takes the place of a `forward`: it leads to groups of processes."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse, with words: on every rank alike.

        Raises:
            ParallelError: always.
        """
        raise ParallelError(
            "a parallelised model was pickled or saved as an object: what gathers its parameters "
            "leads to groups of processes, which no file holds. Save its state: "
            "save_pretrained(model, folder), vescale_ckpt, or torch.save(model.state_dict(), ...) "
            "in vescale_dtensor.state_dict.pickled(...), and load it into a model that is built "
            "anew. copy.deepcopy(model) copies a model."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """That of a copied model."""
        made = object.__new__(type(self))
        memo[id(self)] = made  # first: what is copied next leads back here
        vars(made).update({name: deepcopy(one, memo) for name, one in vars(self).items()})
        return made
