"""`parallelize(..., static=True)` of a model in stages: blocks are captured, with eager's bits.

`torch.compile` runs it as it is, and says so: eager mode's bits as well.
"""

import warnings
from typing import Any

import pytest
import torch
from stage_runs import ROWS, batch, make, plan
from static_stage_runs import are_plain, made, replays, require_same_bits, trained, values_of
from torch import nn
from vescale_comm import simulate
from vescale_comm.testing import on_ranks, run
from vescale_parallel import captured_units, forward_backward, parallelize
from vescale_parallel import mesh as make_mesh
from zero_models import whole

LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "pp4": ({"pp": 4}, {}),
    "pp2 tp2": ({"pp": 2, "tp": 2}, {}),
    "pp2 dp2": ({"pp": 2, "dp": 2}, {}),
    "pp2 zero3": ({"pp": 2, "dp": 2}, {"zero": 3}),
    "pp2 cp2": ({"pp": 2, "cp": 2}, {"batch": "cp:1"}),
}
CHUNKS = {"interleaved": 8, "zbv": 8, "dualpipev": 8}
"""Blocks that four ranks need for two stages each."""


def steps(rows: int = ROWS, count: int = 3) -> Any:
    return trained(lambda step: (batch(step, rows), {}), count)


def on_a_rank(
    rank: int, world_size: int, layout: str, schedule: str, rows: int, fields: dict[str, Any]
) -> None:
    sizes, words = LAYOUTS[layout]
    tied = layout != "pp2 cp2"
    blocks = CHUNKS.get(schedule, 4) if "pp4" in layout else 4
    # Both directions of four ranks have to be filled.
    microbatches = 8 if rows > 8 else 4
    how = plan(schedule, microbatches, **words, **fields)
    units = require_same_bits(lambda: make(tied, blocks), sizes, how, steps(rows))
    if set(sizes) == {"pp"}:
        assert are_plain(units)
        assert len(units) == blocks // sizes["pp"], units
        return
    # One program, and one for the microbatch that is smaller.
    number = 3 * 4 - (1 if rows % 4 == 0 else 2)
    found = replays(units)
    assert len(found) == blocks // sizes["pp"], units
    assert all(count == number for count in found.values()), units


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipev"])
def test_stages_have_the_bits_of_eager_mode(schedule: str, layout: str):
    ranks = torch.Size(LAYOUTS[layout][0].values()).numel()
    rows = 7 if layout in ("pp4", "pp2 tp2") else 8
    if schedule == "dualpipev" and layout == "pp4":
        rows = 15
    simulate(ranks)(on_a_rank, layout, schedule, rows, {})


@pytest.mark.parametrize("layout", ["pp2 tp2", "pp2 zero3"])
@pytest.mark.parametrize("checkpoint", ["full", "selective"])
def test_blocks_that_are_computed_again(layout: str, checkpoint: str):
    simulate(4)(on_a_rank, layout, "1f1b", 8, {"checkpoint": checkpoint})


@pytest.mark.parametrize(("zero", "schedule"), [(1, "1f1b"), (2, "zb-h1")])
def test_levels_of_zero(zero: int, schedule: str):
    simulate(4)(on_a_rank, "pp2 dp2", schedule, 8, {"zero": zero})


def test_precision_casts_parameters():
    how = {"precision": {"compute": "bfloat16"}}
    simulate(4)(on_a_rank, "pp2 tp2", "1f1b", 8, how)


def test_processes_do_as_simulated_ranks():
    run(on_a_rank, 4, "pp2 tp2", "zb-h1", 7, {})


LAYOUTS["pp2"] = ({"pp": 2}, {})


def evaluated(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Training, evaluation by both ways, modes and sizes that change."""
    every: list[Any] = []
    for step in range(5):
        rows = 8 if step % 2 else 6
        model.train(step != 3)
        every.append(forward_backward(model, *batch(step, rows)))
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            every += [model(*batch(step, 4)), forward_backward(model, *batch(step, 8))]
        model.train()
    return every


class Scaled(nn.Module):
    """A block with a number that Python holds, and a state that only some blocks have."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.1)
        self.scale, self.keeps, self.calls, self.fails = 1.0, keeps, 0, False

    def forward(self, x: Any) -> Any:
        if self.fails:
            raise ValueError("told to")
        if self.keeps:
            self.calls += 1
        return x + self.dropout(self.linear(x).tanh()) * self.scale


class Mixed(nn.Module):
    """Blocks of which the first one counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Scaled(at == 0) for at in range(4))
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: Any, targets: Any) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def mixed() -> nn.Module:
    torch.manual_seed(4)
    return Mixed()


def hostile(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """What changes between steps: attributes, rates, frozen blocks, sums over steps, hooks."""
    every: list[Any] = []

    def step(seed: int) -> None:
        every.append(forward_backward(model, *batch(seed)))
        every.append(values_of([one.grad for one in model.parameters() if one.grad is not None]))

    for seed in range(2):
        step(seed)
        optimizer.step()
        optimizer.zero_grad()
    model.blocks[0].scale = 0.5  # type: ignore[union-attr]
    model.blocks[2].dropout.p = 0.4  # type: ignore[union-attr]
    step(2)
    step(3)  # accumulates
    optimizer.param_groups[0]["lr"] = 1e-3
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    model.blocks[1].requires_grad_(False)
    step(4)
    optimizer.step()
    model.blocks[1].requires_grad_(True)
    seen: list[Any] = []
    handle = model.blocks[1].register_forward_hook(lambda m, a, out: seen.append(out.detach()))
    step(5)
    handle.remove()
    every += [torch.tensor(len(seen)), step(6), step(7)]
    return every


def after_an_error(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    every: list[Any] = []
    for seed in range(4):
        if seed == 2:
            here = torch.get_rng_state()
            model.blocks[2].fails = True  # type: ignore[union-attr]
            with pytest.raises(Exception, match="told to"):
                forward_backward(model, *batch(seed))
            assert torch.equal(torch.get_rng_state(), here)
            model.blocks[2].fails = False  # type: ignore[union-attr]
        every.append(forward_backward(model, *batch(seed)))
        optimizer.step()
        optimizer.zero_grad()
    return every


EVERYWHERE = {"parameters": {"*": "replicate"}}
PROGRAMS: dict[str, tuple[Any, Any, Any]] = {
    "evaluations and modes": (lambda: make(True), plan("1f1b", 2), evaluated),
    "what changes": (mixed, plan("zb-h1", 4).with_(**EVERYWHERE), hostile),
    "an error": (mixed, plan("1f1b", 4).with_(**EVERYWHERE), after_an_error),
}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("layout", ["pp2", "pp2 tp2", "pp2 zero3"])
def test_programs_have_the_bits_of_eager_mode(layout: str, program: str):
    def on_a_rank(rank: int, world_size: int) -> None:
        (sizes, words), (build, how, calls) = LAYOUTS[layout], PROGRAMS[program]
        units = require_same_bits(build, sizes, how.with_(**words), calls)
        if layout == "pp2":
            assert are_plain(units)
            return
        # The first of the mixed blocks counts its calls.
        refused = {one.name for one in units if one.name and one.refusal is not None}
        assert refused <= ({"blocks.0"} if build is mixed else set())
        assert replays(units)
        assert all(replays(units).values()) or program == "what changes", units

    simulate(torch.Size(LAYOUTS[layout][0].values()).numel())(on_a_rank)


@pytest.mark.filterwarnings("ignore:capture:UserWarning")  # which says so
@on_ranks(4, simulated=True)
def test_a_call_that_keeps_changing_is_bounded():
    model, _ = made(lambda: make(True), {"pp": 2, "tp": 2}, plan("1f1b", 2), True)
    model.eval()
    with torch.no_grad():
        for rows in range(2, 40):
            model(*batch(rows, rows))
    units = captured_units(model)
    assert all(0 < one.programs <= 4 for one in units), units


def compile(model: nn.Module, how: str) -> nn.Module:
    if how == "model" and model._compiled_call_impl is None:
        model.compile(backend="eager")
    elif how == "blocks":
        for block in model.blocks:
            block.compile(backend="eager")
    return torch.compile(model, backend="eager") if how == "wrapped" else model


@pytest.mark.parametrize("which", ["model", "blocks", "wrapped"])
@on_ranks(2)
def test_compiled_stages_run_as_they_are(which: str):
    torch.compiler.reset()
    found: list[list[Any]] = []
    for how in ("eager", which):
        model = make(True)
        parallelize(model, make_mesh(device_type="cpu", pp=2), plan("1f1b", 2))
        values: list[Any] = []
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for step in range(3):
                # The first step is not compiled: what it has learned holds for the others.
                called = compile(model, how) if step else model
                torch.manual_seed(step)
                values.append(forward_backward(called, *batch(step)))
                with torch.no_grad():
                    values.append(model(*batch(step)))
        said = [str(one.message) for one in told if "as it is" in str(one.message)]
        assert bool(said) == (how != "eager"), (how, said)
        values += [whole(one.grad) for one in model.parameters() if one.grad is not None]
        found.append(values)
    eager, other = found
    assert len(eager) == len(other) > 4
    for one, two in zip(eager, other, strict=True):
        assert torch.equal(one, two)
