"""Which operators a call is made of."""

from torch.utils._python_dispatch import TorchDispatchMode

VIEWS = {"alias", "detach", "narrow", "slice", "split", "split_with_sizes", "unbind", "view"}
VIEWS |= {"_unsafe_view", "tensor_split"}


class Seen(TorchDispatchMode):
    """The operators that were called, those that only look at memory left out."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__.removesuffix("_")
        if name not in VIEWS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))
