"""Digests of global tensors, so that runs on different meshes can be compared bit by bit."""

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from vescale_parallel._common.checksums import element_bytes


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the plain tensor of one device: gathered where it is distributed (a collective)."""
    # By method, not by class: the digest of a plain model needs no tensor layer.
    gather = getattr(tensor, "full_tensor", None)
    full: Tensor = tensor if gather is None else gather()
    return full.detach()


def digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 over names, shapes, dtypes and bytes of the global tensors."""
    # One tensor at a time: never more than one is gathered, however large the model.
    total = hashlib.sha256()
    for name, tensor in tensors:
        full = full_tensor(tensor)
        total.update(f"{name} {tuple(full.shape)} {full.dtype};".encode())
        total.update(element_bytes(full))
    return total.hexdigest()


class DropoutMasks:
    """Observes which elements every `nn.Dropout` of a model lets through, while it is entered.

    Ordinary forward hooks see the output; what is not zero was kept. (Elements that were zero
    before, as masked attention weights, say nothing and are equal on every mesh.)
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Dropout)]
        self._handles: list[Any] = []
        self.digests: list[tuple[str, str]] = []

    def __enter__(self) -> "DropoutMasks":
        for name, module in self._modules:
            self._handles.append(module.register_forward_hook(self._observer(name)))
        return self

    def _observer(self, name: str) -> Any:
        def observe(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            # Not part of training: it must leave no trace in the graph.
            with torch.no_grad():
                kept = output != 0
            self.digests.append((name, digest([(name, kept)])))

        return observe

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()
