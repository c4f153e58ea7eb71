"""What operators are said to write and draw is what they do: those below every case, on one device.

A pass over a graph that trusts a schema would repeat, move or leave out what it does not state.
"""

from typing import Any
from zlib import crc32

import pytest
import torch
from rule_cases import CASES
from rule_fuzz import phase, values
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vescale_comm.operators import arguments_of, effects_of

PARTS = 8


def memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def bits(value: Any, written: set[int]) -> list[list[int]]:
    """The bytes of the tensors of an argument, but for those in memory that may be written."""
    found = []
    for one in tree_leaves(value):
        if not isinstance(one, Tensor) or one.layout is not torch.strided:
            continue
        if one.numel() < 10_000 and memory(one) not in written:
            held = one.detach().resolve_conj().resolve_neg().contiguous().view(-1)
            found.append(held.view(torch.uint8).tolist() if held.numel() else [])
    return found


class Watch(TorchDispatchMode):
    """Notes what operators do that they are not said to."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.silent: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = arguments_of(func, args, kwargs)
        effects = effects_of(func, given)
        targets = tree_leaves([given.get(name) for name in effects.writes])
        written = {memory(one) for one in targets if isinstance(one, Tensor)}
        looked = {name: bits(one, written) for name, one in given.items()}
        state = torch.get_rng_state()
        result = func(*args, **(kwargs or {}))
        self.seen.add(str(func))
        self.silent |= {
            f"{func} writes {n}" for n, old in looked.items() if bits(given[n], written) != old
        }
        if not effects.draws and not torch.equal(state, torch.get_rng_state()):
            self.silent.add(f"{func} draws")
        return result


def watched(names: list[str]) -> Watch:
    watch = Watch()
    for name in names:
        op = CASES[name]
        generator = torch.Generator().manual_seed(crc32(name.encode()))
        given = [values(one, generator) for one in op.operands]
        for tensor, operand in zip(given, op.operands, strict=True):
            tensor.requires_grad_(tensor.is_floating_point() and operand.grad)
        # As the program that computes them: leaves are not written to in place.
        used = [one * 1 if one.requires_grad else one for one in given]
        with watch:
            result, _ = phase(lambda op=op, used=used: op.call(*used))
            outputs = [o for o in tree_leaves(result) if isinstance(o, Tensor) and o.requires_grad]
            dense = [o for o in outputs if o.layout is torch.strided]
            phase(
                lambda dense=dense: torch.autograd.backward(
                    dense, list(map(torch.ones_like, dense))
                )
            )
    return watch


def test_a_sample_and_every_normalization():
    found = watched([name for name in CASES if crc32(name.encode()) % 40 == 0 or "norm" in name])
    assert not found.silent
    assert "aten.native_batch_norm.default" in found.seen


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_case(part: int):
    found = watched([name for at, name in enumerate(CASES) if at % PARTS == part])
    assert not found.silent


def test_what_is_not_said_is_seen():
    def silent() -> None:
        torch.ops.aten.native_batch_norm.default(
            torch.randn(4, 3), None, None, *held, True, 0.1, 1e-5
        )

    held = nn.BatchNorm1d(3).running_mean, nn.BatchNorm1d(3).running_var
    watch = Watch()
    with watch, pytest.MonkeyPatch.context() as patch:
        patch.setattr("vescale_comm.operators._UPDATES", {})
        silent()
    assert len(watch.silent) == 2
