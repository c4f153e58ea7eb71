"""torch's `save_on_cpu` around eager steps: what autograd saves is copied, and the bits stay.

The device of these tests is the host, where `save_on_cpu` copies nothing. So hooks of the same kind
that do copy stand beside it.
"""

from math import prod
from typing import Any

import pytest
import torch
from offload_runs import backward
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from vescale_comm import simulate
from vescale_dtensor import DTensor
from zero_models import distributed, gradients, make


class Copied(saved_tensors_hooks):
    """Copies what is saved, as `save_on_cpu` does on a device, and counts it."""

    def __init__(self) -> None:
        self.bytes = 0

        def pack(tensor: Tensor) -> Tensor:
            # Local tensors come here; a wrapper only where a checkpoint keeps its arguments.
            if not isinstance(tensor, DTensor):
                self.bytes += tensor.nbytes
            return tensor.detach().clone()

        super().__init__(pack, lambda copy: copy)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"dp": 2, "tp": 2}, {"zero": 0}),
        ({"dp": 2, "tp": 2}, {"zero": 3}),
        ({"dp": 2}, {"zero": 3, "checkpoint": "full"}),
        ({"dp": 2}, {"zero": 2, "checkpoint": "selective"}),
    ],
)
def test_the_bits_stay(sizes: dict[str, int], words: dict[str, Any]):
    def run(rank: int, world_size: int) -> None:
        found: list[dict[str, Tensor | None]] = []
        copied = Copied()
        for around in (None, save_on_cpu(), copied):
            model = distributed(make(), sizes, **words)
            if around is None:
                backward(model, 0)
            else:
                with around:
                    backward(model, 0)
            found.append(gradients(model))
        assert copied.bytes > 0
        for name, expected in found[0].items():
            assert expected is not None
            assert all(torch.equal(one[name], expected) for one in found[1:])

    simulate(prod(sizes.values()))(run)
