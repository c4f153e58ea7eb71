"""A module under torch's tensor-parallel styles computes what it computes on one device: outputs,
losses and gradients, for every recipe that torch documents. In real and in simulated processes.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
import vescale_dtensor as vd
from named_cases import named_cases
from on_mesh import on_mesh
from torch import nn
from torch.distributed import tensor as stock
from vescale_comm import simulate, trace
from vescale_comm.testing import run
from vescale_dtensor import LayoutError, MeshError, Replicate, Shard
from vescale_dtensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

CASES, case = named_cases()
EVEN_ONLY = set()


def even_only(function):
    """A case whose plain local tensors are reshaped by hand, which takes even shards."""
    EVEN_ONLY.add(function.__name__)
    return case(function)


class MLP(nn.Module):
    def __init__(self, size=6, hidden=10):
        super().__init__()
        self.up, self.down = nn.Linear(size, hidden), nn.Linear(hidden, size)

    def forward(self, x):
        return self.down(F.relu(self.up(x)))


class Attention(nn.Module):
    """As in torch's recipe, the forward knows heads by their size only."""

    def __init__(self, size=16, head=2):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(size, size) for _ in range(4))
        self.head = head

    def forward(self, x, mask=None):
        heads = [w(x) for w in (self.wq, self.wk, self.wv)]
        q, k, v = (h.unflatten(-1, (-1, self.head)).transpose(1, 2) for h in heads)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, size=16):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.attention, self.mlp = Attention(size), MLP(size, 24)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, words=12, size=16, tied=False):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(words, size), nn.Embedding(8, size)
        self.layers = nn.ModuleList(Block(size) for _ in range(2))
        self.norm, self.output = nn.LayerNorm(size), nn.Linear(size, words, bias=False)
        if tied:
            self.output.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def made(factory, *args, **kwargs):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return factory(*args, **kwargs)


def whole(value):
    return value.full_tensor() if isinstance(value, vd.DTensor) else value


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def same_gradients(model, reference):
    theirs = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, vd.DTensor) or name.startswith("positions"), name
        torch.testing.assert_close(whole(parameter.grad), theirs[name].grad, msg=name)


def compare(mesh, model, plan, *inputs, loss=lambda out: whole(out).square().mean()):
    """Parallelize a copy, and compare outputs, gradients of inputs and of parameters."""
    reference = copy.deepcopy(model)
    assert parallelize_module(model, mesh, plan) is model
    results = []
    for each in (model, reference):
        given = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
        out = each(*given)
        loss(out).backward()
        results.append((whole(out).detach(), [whole(x.grad) for x in given]))
    (ours, grads), (theirs, expected) = results
    torch.testing.assert_close(ours, theirs)
    for found, wanted in zip(grads, expected, strict=True):
        assert (found is None) == (wanted is None)
        if found is not None:
            torch.testing.assert_close(found, wanted)
    same_gradients(model, reference)


@case
def an_mlp_by_columns_and_rows(mesh):
    compare(mesh, made(MLP), {"up": ColwiseParallel(), "down": RowwiseParallel()}, draw(5, 6))
    # Uneven and empty shards: a plain local tensor of features tells what is global.
    wide = made(MLP, 6, 4)
    with trace() as traced:
        parallelize_module(
            wide, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()}, src_data_rank=None
        )
    assert traced.counts() == {}
    with trace() as traced:
        wide(draw(5, 6))
    assert traced.counts() == {"all_reduce": 1}


@case
def an_mlp_of_distributed_tensors(mesh):
    plan = {
        "up": ColwiseParallel(use_local_output=False),
        "down": RowwiseParallel(use_local_output=False),
    }
    compare(mesh, made(MLP, 6, 7), plan, draw(5, 6))
    model = parallelize_module(made(MLP, 6, 7), mesh, plan)
    assert model.up.weight.placements == (Shard(0),)
    assert model.up.bias.placements == (Shard(0),)
    assert model.down.weight.placements == (Shard(1),)
    assert model.down.bias.placements == (Replicate(),)
    assert model.up(draw(2, 6)).placements == (Shard(1),)


@case
def inputs_and_outputs_in_other_layouts(mesh):
    """Sharded rows go in, and sharded rows come out, through torch's placements."""
    rank, ranks = mesh.get_local_rank(), mesh.size()
    model, reference = made(MLP), made(MLP)
    plan = {
        "up": ColwiseParallel(input_layouts=stock.Shard(0)),
        "down": RowwiseParallel(output_layouts=stock.Shard(0)),
    }
    parallelize_module(model, mesh, plan)
    x = draw(4, 6)
    mine = x.chunk(ranks)[rank] if rank < len(x.chunk(ranks)) else x[:0]
    out = model(mine)
    expected = reference(x)
    torch.testing.assert_close(out, (expected.chunk(ranks) + (expected[:0],) * ranks)[rank])
    expected.square().sum().backward()
    out.square().sum().backward()
    same_gradients(model, reference)


@even_only
def an_attention_block(mesh):
    columns = dict.fromkeys(("wq", "wk", "wv"), ColwiseParallel())
    compare(mesh, made(Attention), {**columns, "wo": RowwiseParallel()}, draw(2, 5, 16))


@case
def an_attention_block_of_distributed_tensors(mesh):
    plan = {
        "w[qkv]": ColwiseParallel(use_local_output=False),
        "wo": RowwiseParallel(use_local_output=False),
    }
    compare(mesh, made(Attention), plan, draw(2, 5, 16))


@case
def embeddings_by_rows_and_by_columns(mesh):
    tokens = torch.tensor([[1, 4, 6], [0, 6, 6]])
    for style in (
        RowwiseParallel(input_layouts=Replicate()),
        RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        RowwiseParallel(input_layouts=Replicate(), use_local_output=False),
        ColwiseParallel(output_layouts=Replicate()),
        ColwiseParallel(output_layouts=Shard(0), use_local_output=False),
    ):
        model, reference = made(nn.Embedding, 7, 4), made(nn.Embedding, 7, 4)
        parallelize_module(model, mesh, style)
        out, expected = model(tokens), reference(tokens)
        mine = expected
        if style.use_local_output and style.output_layouts != (Replicate(),):
            mine = vd.distribute_tensor(expected, mesh, style.output_layouts).to_local()
        torch.testing.assert_close(whole(out), mine)
        whole(out).sum().backward()
        expected.sum().backward()
        torch.testing.assert_close(whole(model.weight.grad), reference.weight.grad)


LAYER = {
    "norm1": SequenceParallel(),
    "norm2": SequenceParallel(),
    "attention": PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
    ),
    "attention.w[qkv]": ColwiseParallel(use_local_output=False),
    "attention.wo": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "mlp.up": ColwiseParallel(use_local_output=False),
    "mlp.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
}


def sequence_plan(output=None):
    plan = {f"layers.*.{name}": style for name, style in LAYER.items()}
    rows = RowwiseParallel(
        input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
    )
    plan["embedding"] = rows
    plan["positions"] = RowwiseParallel(
        input_layouts=Replicate(), output_layouts=Shard(0), use_local_output=False
    )
    plan["norm"] = SequenceParallel()
    plan["output"] = output or ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    return plan


@case
def a_transformer_along_the_sequence(mesh):
    tokens = torch.arange(14).reshape(2, 7) % 12
    compare(mesh, made(Transformer), sequence_plan(), tokens)


@case
def a_loss_of_sharded_classes(mesh):
    tokens = torch.arange(14).reshape(2, 7) % 12
    targets = tokens.roll(1)
    output = ColwiseParallel(input_layouts=Shard(1), use_local_output=False)
    model, reference = made(Transformer), made(Transformer)
    parallelize_module(model, mesh, sequence_plan(output))
    logits = model(tokens)
    assert logits.placements == (Shard(2),)
    for options in ({}, {"reduction": "sum"}, {"label_smoothing": 0.1}, {"ignore_index": 3}):
        expected = F.cross_entropy(reference(tokens).flatten(0, 1), targets.flatten(), **options)
        with loss_parallel():
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), **options)
        torch.testing.assert_close(whole(loss), expected)
    with loss_parallel():
        rows = logits.detach().flatten(0, 1).requires_grad_()
        with trace() as traced:
            F.cross_entropy(rows, targets.flatten()).backward()
        # A few numbers for each of 14 rows, and never the 12 classes of them.
        assert max((max(r.shape, default=0) for r in traced.records), default=0) <= 14 * 4
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
    F.cross_entropy(reference(tokens).flatten(0, 1), targets.flatten()).backward()
    same_gradients(model, reference)


@case
def shared_parameters_stay_shared(mesh):
    tokens = torch.arange(14).reshape(2, 7) % 12
    model = made(Transformer, tied=True)
    compare(mesh, model, sequence_plan(), tokens)
    assert model.output.weight is model.embedding.weight
    assert model.embedding.weight.placements == (Shard(0),)
    # A place without a style gets the distributed parameter, too.
    model = made(Transformer, tied=True)
    reference = copy.deepcopy(model)
    plan = {"output": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, mesh, plan)
    assert model.output.weight is model.embedding.weight
    whole(model(tokens)).sum().backward()
    reference(tokens).sum().backward()
    found = whole(model.embedding.weight.grad)
    torch.testing.assert_close(found, reference.embedding.weight.grad)
    with pytest.raises(LayoutError, match="one parameter"):
        parallelize_module(
            made(Transformer, tied=True),
            mesh,
            {"output": ColwiseParallel(), "embedding": ColwiseParallel()},
        )


class Named(nn.Module):
    """Takes tensors by position and by name, and what is no tensor."""

    def __init__(self):
        super().__init__()
        self.seen = None

    def forward(self, x, scale, *, bias=None, other=None):
        self.seen = (x, bias, other)
        return (x * scale + (0 if bias is None else bias), other)


@case
def inputs_by_position_and_by_name(mesh):
    x, bias, other = draw(4, 6), draw(4, 6, seed=1), draw(3)
    style = PrepareModuleInput(
        input_layouts=(Replicate(), None),
        desired_input_layouts=(Shard(0), None),
        input_kwarg_layouts={"bias": Replicate(), "absent": Replicate()},
        desired_input_kwarg_layouts={"bias": Shard(0), "absent": Shard(0)},
    )
    module = parallelize_module(Named(), mesh, style)
    out, same = module(x, 2.0, bias=bias, other=other)
    assert [type(value) for value in module.seen] == [vd.DTensor, vd.DTensor, torch.Tensor]
    assert module.seen[0].placements == module.seen[1].placements == (Shard(0),)
    assert same is other
    torch.testing.assert_close(out.full_tensor(), x * 2 + bias)
    assert module(x, 2.0, bias=None)[0].placements == (Shard(0),)
    with pytest.raises(ValueError, match="layouts for 2 tensors, found 1"):
        module(x, scale=2.0)

    by_name = PrepareModuleInput(
        input_kwarg_layouts={"bias": Replicate()}, desired_input_kwarg_layouts={"bias": Shard(0)},
        use_local_output=True,
    )  # fmt: skip
    module = parallelize_module(Named(), mesh, by_name)
    mine = vd.distribute_tensor(bias, mesh, [Shard(0)]).to_local()
    module(mine, 2.0, bias=bias)
    assert type(module.seen[1]) is torch.Tensor
    assert torch.equal(module.seen[1], mine)


@case
def outputs_by_position(mesh):
    style = PrepareModuleInputOutput(
        input_layouts=(Replicate(), None),
        desired_input_layouts=(Shard(0), None),
        output_layouts=(Shard(0), None),
        desired_output_layouts=(Replicate(), None),
    )
    module = parallelize_module(Named(), mesh, style)
    x, other = draw(4, 6).requires_grad_(), draw(3)
    out, same = module(x, 3.0, other=other)
    assert type(out) is torch.Tensor
    assert same is other
    torch.testing.assert_close(out, x * 3)
    out.square().sum().backward()
    torch.testing.assert_close(x.grad, 18 * x.detach())
    one = PrepareModuleOutput(
        output_layouts=Replicate(), desired_output_layouts=Shard(0), use_local_output=False
    )
    module = parallelize_module(nn.Identity(), mesh, one)
    assert module(draw(4, 6)).placements == (Shard(0),)
    with pytest.raises(ValueError, match="layouts for 1 tensors, found 2"):
        parallelize_module(Named(), mesh, one)(draw(2), 2.0)


@case
def parameters_come_from_one_rank_or_from_each(mesh):
    rank = mesh.get_local_rank()
    for source in (0, 1, None):
        model = MLP()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float(rank))
        plan = {"": SequenceParallel()} if source == 1 else {"up": ColwiseParallel()}
        parallelize_module(model, mesh, plan, src_data_rank=source)
        found = model.up.weight.to_local()
        expected = float(rank) if source is None else float(source)
        assert (found == expected).all()


@case
def styles_of_ones_own(mesh):
    class Doubled(ParallelStyle):
        def _apply(self, module, device_mesh):
            self.seen = self.src_data_rank
            return nn.Sequential(module, module)

    style = Doubled()
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    parallelize_module(model, mesh, {"0": style}, src_data_rank=None)
    assert style.seen is None
    assert type(model[0]) is nn.Sequential


@case
def what_cannot_be_is_an_error(mesh):
    with pytest.raises(NotImplementedError, match=r"knows nn\.Linear and nn\.Embedding"):
        parallelize_module(nn.LayerNorm(3), mesh, ColwiseParallel())
    with pytest.raises(TypeError, match="found int"):
        parallelize_module(nn.Linear(2, 2), mesh, 3)
    with pytest.warns(UserWarning, match="is called 'upp'"):
        parallelize_module(MLP(), mesh, {"upp": ColwiseParallel()})
    with pytest.warns(UserWarning, match="no plan"):
        parallelize_module(MLP(), mesh)
    with pytest.raises(MeshError, match="no device_mesh"):
        parallelize_module(MLP(), None, {"up": ColwiseParallel()})
    with pytest.raises(AssertionError, match="same length"):
        PrepareModuleInput(input_layouts=(Shard(0),), desired_input_layouts=())
    with pytest.raises(AssertionError, match="same length"):
        PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=(None, None))
    linear = parallelize_module(nn.Linear(2, 4), mesh, ColwiseParallel())
    with pytest.raises(LayoutError, match="by position"):
        linear(input=draw(2, 2))
    assert "use_local_output=True" in repr(ColwiseParallel())
    with mesh:
        parallelize_module(MLP(), parallelize_plan={"up": ColwiseParallel()})


def in_a_process(rank, world, name):
    CASES[name](vd.init_device_mesh("cpu", (world,), mesh_dim_names=("tp",)))


def in_simulation(name, ranks):
    def program(rank, world_size):
        CASES[name](vd.init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",)))

    simulate(ranks)(program)


@pytest.mark.parametrize("name", ["a_loss_of_sharded_classes", "shared_parameters_stay_shared"])
def test_in_real_processes(name):
    run(in_a_process, 2, name)


@pytest.mark.parametrize("name", CASES)
def test_on_many_simulated_ranks(name):
    in_simulation(name, 4 if name in EVEN_ONLY else 3)


def test_a_mesh_of_two_axes_is_refused():
    def program(mesh):
        with pytest.raises(MeshError, match=r'mesh\["dp"\] or mesh\["tp"\]'):
            parallelize_module(MLP(), mesh, {"up": ColwiseParallel()})
        compare(mesh["tp"], made(MLP), {"up": ColwiseParallel(), "down": RowwiseParallel()},
                draw(5, 6))  # fmt: skip

    on_mesh((2, 2), program, ("dp", "tp"))
