"""Peak bytes of tensors, for tests of models without storage and for the table of their cost."""

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vescale_dtensor import DTensor
from vescale_parallel._deferred.recording import DeferredTensor


class Peak(TorchDispatchMode):
    """Counts the bytes of storages that are alive at a time, in this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[StorageWeakRef, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            plain = isinstance(one, torch.Tensor) and not isinstance(one, DeferredTensor | DTensor)
            if plain and not one.is_meta:
                storage = one.untyped_storage()
                self.alive.setdefault(StorageWeakRef(storage), storage.nbytes())
        self.alive = {ref: size for ref, size in self.alive.items() if not ref.expired()}
        self.most = max(self.most, sum(self.alive.values()))
        return made
