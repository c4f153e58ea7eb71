"""What deferred models cost: `python tests-integration/deferred_table.py` prints a guide's table.

A Llama of Hugging Face: seconds and peak bytes of tensors to build it on one device, to build it
deferred, and for rank 0 of a mesh of simulated ranks to make what it stores, compared bit by bit.

    python tests-integration/deferred_table.py --gib 30

makes a model of so many GiB, which may be more than this machine has, as 16 simulated ranks, of
which each gives back what it stores before the next one begins.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vescale_comm import simulate
from vescale_parallel import Plan, deferred, parallelize
from vescale_parallel import mesh as make_mesh

SUPPORT = Path(__file__).parents[1] / "packages/vescale-parallel/tests/support"
sys.path.insert(0, str(SUPPORT))
from peak import Peak  # noqa: E402, the same as in the tests


def model_of(width: int, layers: int, vocabulary: int) -> LlamaForCausalLM:
    """A Llama of that size."""
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=width,
            intermediate_size=width * 7 // 2,
            num_hidden_layers=layers,
            num_attention_heads=width // 128,
            num_key_value_heads=max(1, width // 1024),
            vocab_size=vocabulary,
        )
    )


def timed(call: Callable[[], Any]) -> tuple[Any, float, int]:
    """The result, seconds, and peak bytes of a call."""
    peak, start = Peak(), time.perf_counter()
    with peak:
        made = call()
    return made, time.perf_counter() - start, peak.most


def rank_0(
    sizes: dict[str, int], zero: int, size: tuple[int, int, int], wanted: dict[str, Any]
) -> tuple[float, int, int, bool]:
    """Seconds, peak and stored bytes of rank 0, and whether all ranks' values are as wanted."""

    def rank(rank: int, world: int) -> tuple[float, int, int, bool]:
        mesh = make_mesh(device_type="cpu", **sizes)
        torch.manual_seed(0)
        with deferred():
            model = model_of(*size)
        plan = Plan.from_hf(model).with_(zero=zero, batch=None)
        _, seconds, most = timed(lambda: parallelize(model, mesh, plan))
        stored = sum(p.to_local().numel() * p.element_size() for p in model.parameters())
        same = [torch.equal(p.full_tensor(), wanted[n]) for n, p in model.named_parameters()]
        return seconds, most, stored, all(same)

    world = 1
    for one in sizes.values():
        world *= one
    every = simulate(world)(rank)
    return *every[0][:3], all(one[3] for one in every)


def in_turn(gib: float) -> str:
    """Make a model of that size on 16 ranks, one after another, and return the table's row."""
    width, sizes, vocabulary = 1024 * max(1, round(gib**0.5 * 1.5)), {"dp": 4, "tp": 4}, 4096
    # Seven matrices a block: q and o, k and v of an eighth, three of 7/2 of the width.
    block = width * width * (2 + 2 / 8 + 3 * 7 / 2)
    layers = max(1, round((gib * 2**28 - 2 * vocabulary * width) / block))
    start, before = time.perf_counter(), _resident()

    def rank(rank: int, world: int) -> int:
        mesh = make_mesh(device_type="cpu", **sizes)
        torch.manual_seed(0)
        with deferred():
            model = model_of(width, layers, vocabulary)
        plan = Plan.from_hf(model).with_(zero=3, batch=None)
        parallelize(model, mesh, plan)
        # Behind the last collective: this rank runs to its end, and gives back what it has.
        held = sum(p.to_local().numel() * p.element_size() for p in model.parameters())
        # Hooks of a model lead back to it: without a collection it would stay for a while.
        del model
        gc.collect()
        # Each rank is a thread with an arena of its own, which keeps what was freed.
        ctypes.CDLL(None).malloc_trim(0)
        return held

    every = simulate(16)(rank)
    seconds = time.perf_counter() - start
    name = f"16 ranks of dp=4, tp=4 in turn, `zero=3`, {sum(every) / 2**30:.1f} GiB together"
    held = f"{(_resident() - before) / 2**20:.0f} | {max(every) / 2**20:.0f}"
    return f"| {name} | {held} | {seconds:.0f} | |"


def _resident() -> int:
    """The most bytes that this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gib", type=float, help="make a model of this size, rank by rank")
    if (gib := parser.parse_args().gib) is not None:
        print(in_turn(gib))
        return
    size = (1024, 4, 32000)
    torch.manual_seed(0)
    model, seconds, most = timed(lambda: model_of(*size))
    wanted = {name: p.detach() for name, p in model.named_parameters()}
    print("| | peak of tensors, MiB | stored, MiB | seconds | bitwise |\n|---|---|---|---|---|")
    stored = sum(p.numel() * p.element_size() for p in model.parameters())
    print(f"| one device | {most / 2**20:.0f} | {stored / 2**20:.0f} | {seconds:.1f} | |")

    def build(*size: int) -> LlamaForCausalLM:
        torch.manual_seed(0)
        with deferred():
            return model_of(*size)

    _, seconds, most = timed(lambda: build(*size))
    print(f"| `deferred()` | {most / 2**20:.0f} | 0 | {seconds:.2f} | |")
    for sizes, zero in (({"tp": 2}, 0), ({"tp": 4}, 0), ({"dp": 4}, 3), ({"dp": 2, "tp": 2}, 3)):
        seconds, most, stored, same = rank_0(sizes, zero, size, wanted)
        name = ", ".join(f"{axis}={n}" for axis, n in sizes.items()) + f", `zero={zero}`"
        held = f"{most / 2**20:.0f} | {stored / 2**20:.0f}"
        print(f"| a rank of {name} | {held} | {seconds:.1f} | {'yes' if same else 'NO'} |")
    model, seconds, most = timed(lambda: build(8192, 80, 128256))
    numel = sum(p.numel() for p in model.parameters())
    name = f"`deferred()`, {numel / 1e9:.1f} G parameters"
    print(f"| {name} | {most / 2**20:.0f} | 0 | {seconds:.1f} | |")


if __name__ == "__main__":
    main()
