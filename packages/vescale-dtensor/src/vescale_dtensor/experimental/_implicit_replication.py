"""`implicit_replication`: plain tensors among DTensors, which are replicated here without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Let plain tensors among DTensors count as replicated.

    The signature is that of `torch.distributed.tensor.experimental.implicit_replication`. They do
    so outside of the block as well, and in it their values go on being compared over the ranks at
    the first executions of each kind of op: torch trusts that they are equal. Where they differ on
    purpose, wrap them with `DTensor.from_local`.
    """
    yield
