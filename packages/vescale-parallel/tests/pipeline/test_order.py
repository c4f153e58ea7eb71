"""Stages hold what lies around the blocks where a forward uses it, however it is registered."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from stage_runs import failures_of, pieces_of, require_gradients, whole
from torch import Tensor, nn
from vescale_comm import simulate
from vescale_parallel import Pipeline, Plan, deferred, forward_backward, parallelize
from vescale_parallel import mesh as make_mesh
from vescale_parallel._pipeline.plan.order import Use, order_of_use

WIDTH, WORDS = 6, 12
NAMES = ("table", "places", "first", "blocks", "middle", "last", "shared", "head")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.up(x)))


class Chooses(Block):
    """As experts do, which look for the rows of each: there is no such thing without values."""

    def forward(self, x: Tensor) -> Tensor:
        rows = (x.sum(-1) > 0).nonzero()
        return super().forward(x) + len(rows) * 0.01


class Model(nn.Module):
    """Uses its modules in one order, and registers them in another.

    Args:
        names: in which they are registered.
        ties: whether code behind the blocks takes the table's weight by itself.
        shares: behind how many blocks the shared norm is called, each time.
    """

    def __init__(
        self,
        names: tuple[str, ...] = NAMES,
        *,
        ties: bool = False,
        shares: tuple[int, ...] = (0, 4),
        block: Callable[[], nn.Module] = Block,
    ) -> None:
        super().__init__()
        torch.manual_seed(3)
        blocks = {str(at): block() for at in range(4)}
        made = {
            "table": nn.Embedding(WORDS, WIDTH),
            "places": nn.Embedding(16, WIDTH),
            "first": nn.LayerNorm(WIDTH),
            "blocks": nn.ModuleDict(blocks),
            "middle": nn.Linear(WIDTH, WIDTH),
            "last": nn.RMSNorm(WIDTH),
            "shared": nn.LayerNorm(WIDTH),
            "head": nn.Linear(WIDTH, WORDS),
        }
        for name in names:
            self.add_module(name, made[name])
        self.ties, self.shares = ties, shares
        self.dummy_inputs = {"tokens": torch.ones(2, 3, dtype=torch.long)}

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Any:
        if (tokens == -1).any():
            raise ValueError("padding")
        x = self.first(self.table(tokens) + self.places(torch.arange(tokens.shape[1])))
        for at in range(4):
            x = self.shared(x) if at in self.shares else x
            x = self.middle(x) if at == 2 else x
            x = self.blocks[str(at)](x)
        x = self.last(self.shared(x) if 4 in self.shares else x)
        x = nn.functional.linear(x, self.table.weight) if self.ties else self.head(x)
        if targets is None:
            return x
        return nn.functional.cross_entropy(x.flatten(0, 1), targets.flatten())


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(WORDS, (5, 4), generator=torch.Generator().manual_seed(2))
    return tokens[:, :-1], tokens[:, 1:]


def step_as_one_device(
    make: Callable[[], Any], sizes: dict[str, int], words: dict[str, Any], inputs: Any = None
) -> None:
    plain = make()
    torch.manual_seed(1)
    given = [pieces_of(one, 4) for one in batch()]
    for rows in zip(*given, strict=True):
        (plain(*rows) * (len(rows[0]) / 5)).backward()

    def on_a_rank(rank: int, world_size: int) -> None:
        model = make()
        plan = Plan(pipeline=Pipeline(stages="blocks.*"), microbatches=4).with_(**words)
        parallelize(model, make_mesh(device_type="cpu", **sizes), plan, inputs=inputs)
        torch.manual_seed(1)
        forward_backward(model, *batch())
        require_gradients(model, plain)

    simulate(torch.Size(sizes.values()).numel())(on_a_rank)


def made_by_chance(seed: int) -> Callable[[], Model]:
    draw = random.Random(seed)
    names = draw.sample(NAMES, len(NAMES))
    ties, shares = draw.random() < 0.5, tuple(draw.sample(range(5), draw.randint(0, 3)))
    return lambda: Model(tuple(names), ties=ties, shares=shares)


LAYOUTS = [({"pp": 2}, {"schedule": "zbv"}), ({"pp": 4}, {}), ({"pp": 2, "dp": 2}, {})]


@pytest.mark.parametrize(("sizes", "words"), LAYOUTS, ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_registering(seed: int, sizes: dict[str, int], words: dict[str, Any]):
    step_as_one_device(made_by_chance(seed), sizes, words)


def late(**options: Any) -> Model:
    return Model(
        ("table", "places", "last", "head", "blocks", "first", "middle", "shared"), **options
    )


def test_a_batch_that_is_given_tells_where_there_is_nothing_else():
    def make() -> Model:
        model = late(block=Chooses)
        del model.dummy_inputs
        return model

    step_as_one_device(make, {"pp": 2}, {}, batch()[0])

    def on_a_rank(rank: int, world_size: int) -> str:
        model = make()
        plan = Plan(pipeline=Pipeline(stages="blocks.*"), microbatches=4)
        parallelize(model, make_mesh(device_type="cpu", pp=2), plan)
        return failures_of(lambda: forward_backward(model, *batch()))

    for told in simulate(2)(on_a_rank):
        assert "Pass parallelize(inputs=...)" in told


def test_inputs_that_do_not_fit_are_named_on_every_rank():
    def on_a_rank(rank: int, world_size: int) -> str:
        model = Model()
        before = copy.deepcopy(model.state_dict())
        plan = Plan(pipeline=Pipeline(stages="blocks.*"), microbatches=2)
        given = {"words": torch.ones(1)}
        here = make_mesh(device_type="cpu", pp=2)
        told = failures_of(lambda: parallelize(model, here, plan, inputs=given))
        assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
        return told

    for told in simulate(2)(on_a_rank):
        assert "Model does not run on inputs=" in told
        assert "unexpected keyword argument 'words'" in told


def test_ranks_that_give_others_are_told():
    def on_a_rank(rank: int, world_size: int) -> str:
        plan = Plan(pipeline=Pipeline(stages="blocks.*"), microbatches=2)
        model, here = late(), make_mesh(device_type="cpu", pp=2)
        if rank:
            del model.dummy_inputs
        model._modules["last"].register_buffer("_unused", None)
        return failures_of(lambda: parallelize(model, here, plan))

    for told in simulate(2)(on_a_rank):
        assert "stages of the pipeline" in told


def order_of(model: nn.Module, inputs: Any = None) -> Any:
    blocks = [f"blocks.{at}" for at in range(4)]
    around = [name for name in NAMES if name != "blocks"]
    return order_of_use(model, blocks, around, inputs)


def test_what_is_found():
    order = order_of(late(ties=True))
    assert order.blocks == [f"blocks.{at}" for at in range(4)]
    assert order.uses == {
        "table": Use(("", "blocks.3"), is_taken=True),
        "places": Use(("",)),
        "first": Use(("",)),
        "shared": Use(("", "blocks.3")),
        "middle": Use(("blocks.1",)),
        "last": Use(("blocks.3",)),
    }


class Waits(Model):
    def forward(self, tokens: Tensor, targets: Any = None) -> Tensor:
        while tokens.sum().item() != 3:
            pass
        return super().forward(tokens, targets)


class Fails(Model):
    @property
    def shares(self) -> Any:
        raise RuntimeError("not without values")

    @shares.setter
    def shares(self, value: Any) -> None: ...


@pytest.mark.parametrize("kind", [Waits, Fails])
def test_nothing_is_known_of_a_model_that_does_not_run_without_values(kind: type[Model]):
    assert order_of(kind()) == ([], {})


def test_the_model_stays_as_it_is():
    model, seen = late(), list[Any]()
    model.last.register_forward_hook(lambda *given: seen.append(given))
    model.draws = random.Random(0)
    state, states = torch.get_rng_state(), (random.getstate(), model.draws.getstate())
    before = {name: (id(one), one.clone()) for name, one in model.named_parameters()}
    modules = {name: {**vars(one)} for name, one in model.named_modules()}
    assert order_of(model).blocks
    assert not seen
    assert torch.equal(torch.get_rng_state(), state)
    assert (random.getstate(), model.draws.getstate()) == states
    for name, one in model.named_parameters():
        assert id(one) == before[name][0]
        assert torch.equal(one, before[name][1])
    for name, one in model.named_modules():
        assert vars(one).keys() == modules[name].keys()


def test_deferred_models_too():
    def on_a_rank(rank: int, world_size: int) -> None:
        plain = late()
        with deferred():
            model = late()
        plan = Plan(pipeline=Pipeline(stages="blocks.*"), microbatches=4)
        parallelize(model, make_mesh(device_type="cpu", pp=2), plan)
        forward_backward(model, *batch())
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(whole(one), other)

    simulate(2)(on_a_rank)


def test_a_plan_tells_it(capsys: pytest.CaptureFixture[str]):
    plan = Plan(pipeline=Pipeline(stages="blocks.*"))
    model, by_calls = late(), "lie by the order in which a forward calls them"
    assert by_calls in plan.explain(model, {"pp": 2})
    del model.dummy_inputs
    assert "in which they are registered" in plan.explain(model, {"pp": 2})
    assert by_calls in plan.explain(model, {"pp": 2}, inputs=batch()[0])
