"""Digests of trainings on 1 to 8 data-parallel ranks: run `python invariance_table.py`.

The trainer's decoder with dropout, AdamW and clipping; `--processes` takes real processes in place
of simulated ranks. Rows with an arrow save a checkpoint half-way and resume it on other ranks. The
digests are of the bits of all losses and norms, and of all parameters at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import vescale_ckpt
from torch import nn
from vescale_comm import simulate
from vescale_comm.testing import run
from vescale_dtensor import DTensor
from vescale_parallel import Invariant, Plan, clip_grad_norm_, forward_backward, parallelize
from vescale_parallel import mesh as make_mesh
from vescale_parallel.train.model import Decoder, ModelConfig

CONFIG = ModelConfig(vocab=61, dim=24, layers=2, heads=4, kv_heads=2, hidden=37, context=16)
STEPS, ROWS = 6, 13
RANKS = (1, 2, 3, 4, 8)
LEVELS = (0, 1, 2, 3)
RESUMED = (((2, 3), (3, 1)), ((8, 2), (1, 0)), ((3, 3), (4, 3)))

Setting = tuple[int, int]
"""Ranks and level of `zero`."""


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets: rows that no number of ranks divides."""
    generator = torch.Generator().manual_seed(1000 + step)
    rows = torch.randint(CONFIG.vocab, (ROWS, CONFIG.context + 1), generator=generator)
    return rows[:, :-1], rows[:, 1:]


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a checkpoint holds."""
    named = dict(model.named_parameters())
    return {
        "model": named,
        "optimizer": {name: dict(optimizer.state[one]) for name, one in named.items()},
        "rng": torch.get_rng_state(),
    }


def part(
    rank: int, world: int, zero: int, steps: Sequence[int], load: str, save: str
) -> tuple[list[str], str]:
    """Losses and norms of some steps as bits, and the digest of the parameters after them."""
    torch.manual_seed(0)
    model: Any = Decoder(CONFIG)
    plan = Plan(zero=zero, deterministic=Invariant(8))
    parallelize(model, make_mesh(device_type="cpu", dp=world), plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if load:
        vescale_ckpt.init_optimizer_state(optimizer)
        loaded = vescale_ckpt.load(load, into=state_of(model, optimizer))
        torch.set_rng_state(loaded["rng"])
    found = []
    for step in steps:
        optimizer.zero_grad()
        loss = forward_backward(model, *batch(step))
        norm = clip_grad_norm_(model, 0.5)
        optimizer.step()
        found += [loss.item().hex(), norm.item().hex()]
    if save:
        vescale_ckpt.save(save, state_of(model, optimizer))
    digest = hashlib.sha256()
    for parameter in model.parameters():
        value = parameter.detach()
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        digest.update(whole.contiguous().numpy().tobytes())
    return found, digest.hexdigest()[:12]


def ranks(setting: Setting, processes: bool, *args: Any) -> tuple[list[str], str]:
    """Run a part on so many ranks; all have to find the same."""
    world, zero = setting
    every = run(part, world, zero, *args) if processes else simulate(world).run(part, zero, *args)
    assert all(one == every[0] for one in every)
    found: tuple[list[str], str] = every[0]
    return found


def trained(setting: Setting, processes: bool) -> tuple[str, str]:
    """Digests of the losses and of the parameters of a training."""
    losses, parameters = ranks(setting, processes, range(STEPS), "", "")
    return _digest(losses), parameters


def resumed(first: Setting, second: Setting, processes: bool) -> tuple[str, str]:
    """The same, with a checkpoint half-way that goes on on other ranks."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "half"))
        one, _ = ranks(first, processes, range(STEPS // 2), "", path)
        two, parameters = ranks(second, processes, range(STEPS // 2, STEPS), path, "")
    return _digest(one + two), parameters


def _digest(losses: list[str]) -> str:
    return hashlib.sha256(" ".join(losses).encode()).hexdigest()[:12]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", action="store_true", help="real processes, by gloo")
    parser.add_argument("--ranks", type=int, nargs="*", default=RANKS)
    options = parser.parse_args()
    print("| ranks | zero | losses | parameters | seconds |\n|---|---|---|---|---|")
    rows = [(f"{world} | {zero}", (world, zero)) for world in options.ranks for zero in LEVELS]
    for name, setting in rows:
        start = time.perf_counter()
        found = trained(setting, options.processes)
        print(f"| {name} | {' | '.join(found)} | {time.perf_counter() - start:.1f} |", flush=True)
    for first, second in RESUMED:
        if {first[0], second[0]} <= set(options.ranks):
            found = resumed(first, second, options.processes)
            name = f"{first[0]} -> {second[0]} | {first[1]} -> {second[1]}"
            print(f"| {name} | {' | '.join(found)} | |", flush=True)
    torch.manual_seed(0)
    for world in options.ranks:
        plan = Plan(deterministic=Invariant(8))
        print(f"\ndp={world}: {plan.check(Decoder(CONFIG), {'dp': world}).invariant}")


if __name__ == "__main__":
    main()
