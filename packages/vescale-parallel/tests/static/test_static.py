"""`parallelize(..., static=True)` trains bit for bit as without it, and says what is captured.

Losses, gradients and parameters of two copies of one model are compared, one of them static: with
dropout, accumulation, evaluation in between, activation checkpointing, and where calls are refused.
Also a Hugging Face model, with caches and without.
`torch.compile` of a parallelised model replays captured forwards: eager mode's bits, no graph.
"""

import copy
import inspect
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from math import prod
from typing import Any

import pytest
import torch
from stage_models import needs_transformers
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint
from vescale_comm import simulate
from vescale_comm.testing import on_ranks, run
from vescale_parallel import CapturedUnit, Plan, captured_units, mesh, no_sync, parallelize
from zero_models import Decoder, adamw, batch, gradients, local, make, plan_for, same

STEPS = 3
DP, DP_TP, HSDP = {"dp": 4}, {"dp": 2, "tp": 2}, {"replica": 2, "dp": 2}
Give = Callable[[int], tuple[Any, ...]]


def both(
    build: Callable[[], nn.Module], sizes: dict[str, int], zero: Any, **words: Any
) -> tuple[nn.Module, nn.Module]:
    """The model parallelised, without and with `static`."""
    over = mesh(device_type="cpu", **sizes)
    plan = plan_for(sizes, zero, **words)
    eager, static = (parallelize(build(), over, plan, static=how) for how in (False, True))
    return eager, static


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, give: Give) -> list[Any]:
    """One step of two microbatches, and an evaluation; everything that they give."""
    torch.manual_seed(seed)  # dropout draws the same numbers in both models
    optimizer.zero_grad()
    with no_sync(model):
        first = model(*give(2 * seed))
        first.backward()
    second = model(*give(2 * seed + 1))
    second.backward()
    found = [first.detach(), second.detach(), *gradients(model).values()]
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    model.eval()
    with torch.no_grad():
        seen = model(*give(seed))
    model.train()
    return [*found, norm, seen, torch.get_rng_state()]


def train_alike(models: tuple[nn.Module, nn.Module], give: Give = batch) -> Any:
    """Train both; returns what is captured of the second."""
    optimizers = [adamw(model.parameters()) for model in models]
    for seed in range(STEPS):
        same(*(step(*pair, seed, give) for pair in zip(models, optimizers, strict=True)))
    eager, static = models
    same(eager.parameters(), static.parameters())
    same(eager.state_dict().values(), static.state_dict().values())
    return {one.name: one for one in captured_units(static)}


def compare(rank: int, world_size: int, sizes: dict[str, int], zero: Any) -> None:
    units = train_alike(both(lambda: make(blocks=2), sizes, zero))
    assert list(units) == ["", "blocks.0", "blocks.1"]
    captured = [units[""]] if not zero else [units["blocks.0"], units["blocks.1"]]
    for unit in captured:
        # One of training and one of evaluation; what is made at the first use may ask for another.
        assert unit.refusal is None
        assert unit.programs <= 4
        assert unit.replays >= 3 * STEPS - 4
    if zero:
        assert "other units are gathered" in str(units[""])


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("sizes", [DP, DP_TP, HSDP], ids=str)
def test_it_trains_as_without_it(sizes: dict[str, int], zero: int):
    simulate(prod(sizes.values()))(compare, sizes, zero)


class Reading(Decoder):
    """A decoder whose forward cannot be recorded; its blocks can."""

    how = "item"

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if self.how == "checkpoint":
            x = self.embed(tokens)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            logits = self.head(self.norm(x))
            return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss = super().forward(tokens, targets)
        if self.how == "item":
            assert loss.item() > 0
        return loss


def reading(how: str) -> Reading:
    torch.manual_seed(0)
    made = Reading(blocks=2)
    made.how = how
    return made


def explained(model: nn.Module, units: dict[str, CapturedUnit]) -> None:
    """`plan.check` and `plan.explain` of a static model name what runs eagerly, and why."""
    report = plan_for({"dp": 2}, 0).check(model, {"dp": 2})
    assert {one.name: one for one in report.captured} == units
    lines = [line.split() for line in str(report).splitlines()]
    (refused,) = [line for line in lines if line[:2] == ["(the", "model)"] and len(line) > 6]
    assert " ".join(refused).endswith(" ".join((units[""].refusal or "").split()))
    (replayed,) = [line for line in lines if line[:1] == ["blocks.0"]]
    one = units["blocks.0"]
    assert replayed == ["blocks.0", *map(str, (one.programs, one.replays, one.compared))]


@pytest.mark.parametrize("how", ["item", "checkpoint", "hook"])
@on_ranks(2, simulated=True)
def test_blocks_are_captured_where_the_model_cannot_be(how: str):
    models = both(lambda: reading(how), {"dp": 2}, 0)
    if how == "hook":
        for model in models:
            model.get_submodule("norm").register_full_backward_hook(lambda *_: None)
    units = train_alike(models)
    assert units[""].replays == 0
    assert units[""].refusal in str(units[""])
    for name in ("blocks.0", "blocks.1"):
        assert units[name].refusal is None, str(units[name])
        assert units[name].replays >= STEPS
    explained(models[1], units)


@pytest.mark.parametrize("zero", [0, 3])
@on_ranks(2, simulated=True)
def test_what_the_plan_computes_again_is_replayed_again(zero: int):
    models = both(lambda: make(blocks=2), {"dp": 2}, zero, checkpoint="full")
    units = train_alike(models)
    if not zero:  # the blocks are parts of the model's program
        assert units[""].refusal is None, str(units[""])
        assert units[""].programs + units[""].replays == 3 * STEPS
        return
    assert units[""].refusal is not None
    for name in ("blocks.0", "blocks.1"):
        assert units[name].refusal is None, str(units[name])
        # Forward and again, of two microbatches, and an evaluation.
        calls = units[name].programs + units[name].replays
        assert calls == 5 * STEPS


@pytest.mark.parametrize(
    "options", [{"inside": False}, {"around": False}, {"around": True}], ids=str
)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # evaluation
@on_ranks(2, simulated=True)
def test_activation_checkpointing_of_units(options: dict[str, bool]):
    units = train_alike(both(lambda: make(blocks=2, **options), {"dp": 2}, 3))
    for name in ("blocks.0", "blocks.1"):
        # Checkpoints inside of a unit are not recorded; around it they run its program again.
        assert (units[name].refusal is None) == ("around" in options)


@on_ranks(2, simulated=True)
def test_hooks_of_users_see_gathered_parameters():
    eager, static = both(lambda: make(blocks=2), {"dp": 2}, 3)
    block = static.get_submodule("blocks.0")
    stored, seen = dict(block.named_parameters()), []
    train_alike((eager, static))

    def look(module: nn.Module, args: Any) -> None:
        found = [(one, stored[name]) for name, one in module.named_parameters() if one.ndim]
        seen.extend(one is other for one, other in found)

    block.register_forward_pre_hook(look)
    train_alike((eager, static))
    assert seen
    assert not any(seen)  # gathered, as in eager mode


class Scaled(nn.Module):
    """Multiplies by a number that its owner changes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x) * self.scale


def scaled() -> nn.Module:
    torch.manual_seed(0)
    return Scaled()


@on_ranks(2, simulated=True)
def test_a_model_that_keeps_changing_is_bounded_and_told_so_once():
    over = mesh(device_type="cpu", dp=2)
    eager, static = (parallelize(scaled(), over, static=how) for how in (False, True))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number in range(40):
            for model in (eager, static):
                model.scale = 1.0 + number
            x = torch.ones(4, 4) * number
            same([eager(x)], [static(x)])
    messages = [str(one.message) for one in told if "another value" in str(one.message)]
    assert len(messages) == 1
    assert "Scaled.forward of the model" in messages[0]
    assert ".scale" in messages[0]
    (unit,) = captured_units(static)
    assert unit.programs <= 32


@on_ranks(2, simulated=True)
def test_it_is_copied_called_and_fails_like_any_module():
    eager, static = both(lambda: make(blocks=2), {"dp": 2}, 3)
    assert captured_units(eager) == []
    assert inspect.signature(static.forward) == inspect.signature(eager.forward)
    assert list(static.state_dict()) == list(eager.state_dict())
    static(*batch(0)), static(*batch(1))
    # A copy has parameters, and programs, of its own.
    copied = copy.deepcopy(static)
    optimizer = torch.optim.SGD(copied.parameters(), lr=1.0)
    for model in (static, copied):
        torch.manual_seed(0)
        model(*batch(2)).backward()
    same(gradients(static).values(), gradients(copied).values())
    optimizer.step()
    copied.eval(), static.eval(), eager.eval()
    same([eager(*batch(3))], [static(*batch(3))])
    assert not torch.equal(local(copied(*batch(3))), local(static(*batch(3))))
    # A call that raises leaves the stored parameters in the modules.
    with pytest.raises(Exception, match=r"size|shape|match"):
        static.get_submodule("blocks.0")(torch.ones(2, 3))
    assert all(isinstance(p, nn.Parameter) for p in static.parameters())
    same([eager(*batch(3))], [static(*batch(3))])


STEPS_OF_TEXT = 4


def llama(cache: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 53, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=cache))


def losses(model: nn.Module, cache: bool, static: bool) -> list[Any]:
    """Logits of an evaluation, losses of some steps, and the parameters after them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.arange(24).reshape(4, 6)
    model.eval()
    with torch.no_grad():  # first: what it gives to layers must not keep them from being captured
        seen = model(input_ids=tokens)
    model.train()
    assert (seen.past_key_values is not None) is cache
    found = [seen.logits.to_local()]
    for seed in range(STEPS_OF_TEXT):
        torch.manual_seed(seed)
        tokens = torch.randint(53, (4, 6))
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        found.append(loss.detach().to_local())
    assert (model(input_ids=tokens).past_key_values is None) is (static or not cache)
    assert model(input_ids=tokens, use_cache=True).past_key_values is not None
    return [*found, *(p.detach().to_local() for p in model.parameters())]


def trains(rank: int, world_size: int, zero: int, cache: bool) -> None:
    over = mesh(device_type="cpu", dp=2, tp=1)
    found = []
    for static in (False, True):
        model = llama(cache)
        plan = Plan.from_hf(model.config).with_(zero=zero)
        told = pytest.warns(UserWarning, match="LlamaForCausalLM makes no cache of keys and values")
        with told if static and cache else nullcontext():
            parallelize(model, over, plan, static=static)
        found.append(losses(model, cache, static))
    assert all(map(torch.equal, *found))
    units = captured_units(model)
    # The whole model, or each of its layers.
    captured = [one for one in units if one.replays >= STEPS_OF_TEXT - 2]
    assert len(captured) == (2 if zero else 1), "\n".join(map(str, units))
    assert all(one.refusal is None for one in captured)


@pytest.mark.models
@needs_transformers
@pytest.mark.parametrize(("zero", "cache"), [(0, True), (3, False), (3, True)])
def test_llama_trains_as_without_it(zero: int, cache: bool):
    llama(cache)  # imported before there are threads
    simulate(2)(trains, zero, cache)


STEPS_COMPILED, SIZES = 4, {"dp": 2}
Call = Callable[..., Tensor]


class Backend:
    """A backend of torch.compile that runs what it is given, and counts the operations."""

    def __init__(self) -> None:
        self.operations: list[str] = []

    def __call__(self, graph: fx.GraphModule, inputs: list[Tensor]) -> Call:
        self.operations += [str(one.target) for one in graph.graph.nodes if "call" in one.op]
        return graph.forward


def the_model(model: nn.Module, backend: Backend) -> Call:
    return torch.compile(model, backend=backend)


def its_method(model: nn.Module, backend: Backend) -> Call:
    model.compile(backend=backend)
    return model


def each_block(model: nn.Module, backend: Backend) -> Call:
    for block in model.blocks:
        block.compile(backend=backend)
    return model


def around_it(model: nn.Module, backend: Backend) -> Call:
    return torch.compile(lambda *given: model(*given), backend=backend)


def a_copy(model: nn.Module, backend: Backend) -> Call:
    """The copy is trained as its own, whatever was compiled before."""
    return torch.compile(copy.deepcopy(model), backend=backend)


def train(model: nn.Module, call: Call) -> list[Any]:
    optimizer, found = adamw(model.parameters()), []
    for seed in range(STEPS_COMPILED):
        torch.manual_seed(seed)
        optimizer.zero_grad()
        loss = call(*batch(seed))
        loss.backward()
        found += [loss.detach(), *(one.clone() for one in gradients(model).values())]
        optimizer.step()
        model.eval()
        with torch.no_grad():
            found.append(call(*batch(seed)))
        model.train()
    return [*found, *(one.detach() for one in model.parameters()), torch.get_rng_state()]


def compare_compiled(
    rank: int, world_size: int, how: Any, zero: int, words: dict[str, Any], blocks: int = 2
) -> Any:
    torch.compiler.reset()  # it looks at eight modules of a kind, and workers serve many cases
    over = mesh(device_type="cpu", **SIZES)
    static = words.pop("static", False)
    plan = plan_for(SIZES, zero, **words)
    eager, other = (
        parallelize(make(blocks=blocks), over, plan, static=one) for one in (False, static)
    )
    backend = Backend()
    call = how(other, backend)
    trained = getattr(call, "_orig_mod", other)
    expected = train(eager, eager)
    # A static model has said that it replays.
    told = pytest.warns(UserWarning, match="captures forwards and replays them: .* given nothing")
    with nullcontext() if static else told:
        found = train(trained, call)
    same(expected, found)
    assert not captured_units(eager)
    return {one.name: one.replays for one in captured_units(trained)}, backend.operations


@pytest.mark.parametrize(
    ("how", "zero"), [(the_model, 0), (the_model, 3), (its_method, 0), (around_it, 3), (a_copy, 3)]
)
def test_a_compiled_model_replays(how: Any, zero: int):
    for replays, operations in run(compare_compiled, 2, how, zero, {}):
        expected = {"blocks.0", "blocks.1"} if zero else {""}
        assert {name for name, number in replays.items() if number >= STEPS_COMPILED} == expected
        assert not operations


def test_compiled_blocks_replay():
    for replays, operations in run(compare_compiled, 2, each_block, 3, {}, 10):
        assert set(replays) >= {f"blocks.{at}" for at in range(10)}
        assert all(number >= STEPS_COMPILED for name, number in replays.items() if name)
        assert not operations


@pytest.mark.parametrize("words", [{"static": True}, {"checkpoint": "full"}], ids=str)
def test_beside_other_words(words: dict[str, Any]):
    for replays, operations in run(compare_compiled, 2, the_model, 3, words):
        assert all(number >= STEPS_COMPILED for name, number in replays.items() if name)
        assert not operations
