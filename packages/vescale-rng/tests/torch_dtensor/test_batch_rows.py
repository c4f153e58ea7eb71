"""Property: under `consistent(data=...)` each draw of plain rows is one device's, row by row."""

import os
import threading

import pytest
import torch
import torch.nn.functional as F
from batch_ranks import RANKS, rows_of, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from vescale_rng import Normal, dropout, fill_, use, whole
from vescale_rng._draw.truncated_normal import _way
from vescale_rng.init import trunc_normal_
from vescale_rng.streams import advance
from vescale_rng.torch_dtensor import consistent

HEADS = 2


def module(kind, *args, **kwargs):
    """A module with the same weights everywhere, made before anything is drawn."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return kind(*args, **kwargs)


def attention(x):
    q = x.flatten(2).unflatten(1, (HEADS, -1))
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.3)


def attention_module(need_weights):
    def run(x):
        attend = module(nn.MultiheadAttention, 4, HEADS, dropout=0.3, batch_first=True)
        x = x.flatten(2)[..., :4]
        return attend(x, x, x, need_weights=need_weights)[0]

    return run


def encoder(x):
    layer = module(nn.TransformerEncoderLayer, 4, HEADS, 8, dropout=0.3, batch_first=True)
    return layer(x.flatten(2)[..., :4])


def recurrent(x):
    lstm = module(nn.LSTM, 4, 3, num_layers=2, dropout=0.5, batch_first=True)
    return lstm(x.flatten(2)[..., :4])[0]


def likelihoods(x):
    return x.flatten(1)[:, :5].sigmoid()


EVERYWHERE = {  # also where a rank has no rows
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout of tokens": lambda x: F.dropout(x.flatten(0, 1), 0.4).unflatten(0, (-1, x.shape[1])),
    "dropout in place": lambda x: F.dropout(x.clone(), 0.4, inplace=True),
    "torch.dropout": lambda x: torch.dropout(x, 0.4, True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.4, True)[0],
    "dropout2d": lambda x: F.dropout2d(x, 0.4),
    "feature_dropout": lambda x: torch.feature_dropout(x, 0.4, True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.4, training=True),
    "nn.Dropout": lambda x: nn.Dropout(0.3)(x),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 10),
    "normal_": lambda x: torch.empty_like(x).normal_(1.0, 2.0),
    "few normal_": lambda x: x.new_empty(len(x), 1).normal_(),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "random_": lambda x: torch.empty_like(x, dtype=torch.int64).random_(7),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.3),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli of each": lambda x: torch.empty_like(x).bernoulli_(x.sigmoid()),
    "normal": lambda x: torch.normal(x, x.abs()),
    "normal_std": lambda x: torch.normal(0.5, x.abs()),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, tau=0.7),
    "trunc_normal_": lambda x: nn.init.trunc_normal_(torch.empty_like(x), std=1.0),
    "distribution": lambda x: torch.distributions.Normal(x, 1.0).rsample(),
    "drop path": lambda x: x * x.new_empty(len(x), 1, 1, 1).bernoulli_(0.7),
    "channels_last": lambda x: F.dropout(x.to(memory_format=torch.channels_last), 0.4),
    "16 bits": lambda x: F.dropout(x.bfloat16(), 0.4),
    "training=False": lambda x: F.dropout(x, 0.4, training=False),
    "p=0": lambda x: F.dropout(x, 0.0),
    "attention": attention,
}
WITH_ROWS = {  # torch itself takes no empty batch here, or we refuse it
    "multinomial": lambda x: torch.multinomial(likelihoods(x), 2),
    "multinomial, replacement": lambda x: torch.multinomial(likelihoods(x), 3, replacement=True),
    "categorical": lambda x: torch.distributions.Categorical(likelihoods(x)).sample(),
    "attention module": attention_module(False),
    "attention module with weights": attention_module(True),
    "encoder layer": encoder,
    "recurrent": recurrent,
    "checkpointed": lambda x: checkpoint(F.dropout, x.requires_grad_(), 0.4, use_reentrant=True),
}

ROUNDED = ("recurrent", "encoder layer", "attention module", "attention module with weights")


def sample(total):
    generator = torch.Generator().manual_seed(total)
    return torch.randn(total, 4, 3, 2, generator=generator)


def drawn(run, x):
    """What is drawn, the gradient if there is one, and the next number."""
    torch.manual_seed(5)
    result = run(x)
    gradient = None
    if x.requires_grad and result.requires_grad:
        result.float().square().sum().backward()
        gradient = x.grad
    return result.detach(), gradient, torch.get_rng_state()


def alike(name, found, expected):
    """Bitwise, but for what a matrix product of fewer rows rounds otherwise."""
    if name in ROUNDED:
        return torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
    return torch.equal(found, expected)


def differences(names, table, total, rank, world, references=None, **options):
    """The ops of which this rank's rows are not those of one device."""
    references = references or table
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    mine = rows_of(total, world, rank)
    wrong = []
    for name in names:
        # Without a gradient besides where rows are uneven, and every rank has some.
        for with_gradient in (False, True) if total == 11 else (True,):
            x = sample(total).requires_grad_(with_gradient)
            local = sample(total)[mine].contiguous().requires_grad_(with_gradient)
            expected = drawn(references[name], x)
            with consistent(data=mesh["dp"], **options):
                found = drawn(table[name], local)
            same = alike(name, found[0], expected[0][mine])
            if expected[1] is not None:
                same = same and alike(name, found[1], expected[1][mine])
            if not same or not torch.equal(found[2], expected[2]):
                wrong.append((name, with_gradient, same))
    return wrong


def every_op(rank, world):
    wrong = []
    for total in (11, 9, 1):
        wrong += differences(EVERYWHERE, EVERYWHERE, total, rank, world)
    for total in (8, 7):
        wrong += differences(WITH_ROWS, WITH_ROWS, total, rank, world)
    return wrong


def told(rank, world):
    names = ["dropout", "dropout of tokens", "randn_like", "few normal_", "drop path"]
    wrong = differences(names, EVERYWHERE, 8, rank, world, rows=2)
    wrong += differences(names, EVERYWHERE, 11, rank, world, rows=(3, 3, 3, 2))
    # A rank without rows cannot reckon: all ask.
    wrong += differences(names, EVERYWHERE, 9, rank, world, rows=(3, 3, 3, 0))
    with use("portable"):
        # One device's numbers are then those of this package, not of stock torch.
        table = {"dropout": lambda x: dropout(x, 0.4, whole(x.shape))}
        wrong += differences(["dropout"], EVERYWHERE, 9, rank, world, table)
    with torch.inference_mode():
        for name in ("dropout", "alpha_dropout", "dropout2d"):
            mesh = init_device_mesh("cpu", (world,))
            expected = drawn(EVERYWHERE[name], sample(9))
            with consistent(data=mesh):
                found = drawn(EVERYWHERE[name], sample(9)[rows_of(9, world, rank)])
            same = torch.equal(found[0], expected[0][rows_of(9, world, rank)])
            if not same or not torch.equal(found[2], expected[2]):
                wrong.append(("inference mode", name))
    return wrong


def test_every_op_on_every_rank():
    assert run(every_op) == [[]] * RANKS


def test_rows_that_are_told_and_other_policies():
    assert run(told) == [[]] * RANKS


def repeated(rank, world):
    """The same shapes again and again: what was found out is looked up, and nobody is asked."""
    mesh, mine = init_device_mesh("cpu", (world,)), rows_of(11, world, rank)
    weight = nn.Parameter(torch.ones(11, 6))

    def draws(x):
        kept = [F.dropout(x, p) for p in (0.4, 0.4, 0.1, 0.4)]
        kept += [F.dropout(one, 0.4) for one in (x.flatten(1), x.transpose(1, 2), x.double(), x)]
        # A parameter is no rows, whatever its shape.
        return [*kept, weight.data[:3].bernoulli_(0.6), torch.rand(())]

    torch.manual_seed(5)
    x = sample(11)
    expected = [draws(x) for _ in range(3)]
    after = torch.get_rng_state()
    torch.manual_seed(5)
    with consistent(data=mesh, rows=(3, 3, 3, 2)):
        F.dropout(x[mine], 0.4)
        torch.manual_seed(5)
        found = [draws(x[mine]) for _ in range(3)]
    pairs = [(a, b) for one, two in zip(found, expected, strict=True)
             for a, b in zip(one[:-2], two[:-2], strict=True)]  # fmt: skip
    return all(torch.equal(a, b[mine]) for a, b in pairs), torch.equal(torch.get_rng_state(), after)


def test_draws_that_are_repeated():
    assert run(repeated) == [(True, True)] * RANKS


def backward_outside(rank, world):
    """Only the forward is in the block; what is recomputed belongs to it all the same."""
    mesh, wrong = init_device_mesh("cpu", (world,)), []
    mine = rows_of(9, world, rank)

    def region(x):
        return F.dropout(F.dropout(x.relu(), 0.4).square(), 0.3)

    for reentrant in (False, True):
        x = sample(9).requires_grad_()
        local = sample(9)[mine].contiguous().requires_grad_()
        torch.manual_seed(5)
        checkpoint(region, x, use_reentrant=reentrant).sum().backward()
        torch.manual_seed(5)
        with consistent(data=mesh):
            loss = checkpoint(region, local, use_reentrant=reentrant).sum()
        loss.backward()
        if not torch.equal(local.grad, x.grad[mine]):
            wrong.append(("plain", reentrant))
        piece = distribute_tensor(sample(9), mesh, [Shard(0)]).requires_grad_()
        torch.manual_seed(5)
        with consistent(data=None):
            loss = checkpoint(region, piece, use_reentrant=reentrant).sum()
        loss.backward()
        if not torch.equal(piece.grad.full_tensor(), x.grad):
            wrong.append(("dtensor", reentrant))
    return wrong


def test_a_backward_after_the_block_draws_as_the_forward():
    assert run(backward_outside, ranks=2) == [[]] * 2


def other_dims(rank, world):
    """A batch that is not the first dim, and attention weights of which it is."""
    layer = module(nn.TransformerEncoderLayer, 4, HEADS, 8, dropout=0.3)  # (time, batch, width)
    x = sample(7).flatten(2)[..., :4].transpose(0, 1).contiguous()
    torch.manual_seed(5)
    expected = layer(x)
    mine = rows_of(7, world, rank)
    torch.manual_seed(5)
    mesh = init_device_mesh("cpu", (world,))
    with consistent(data=mesh, batch_dim=1):
        # Attention weights are (batch, heads, time, time), and that is known.
        found = layer(x[:, mine].contiguous())
    same = torch.equal(found, expected[:, mine])
    with consistent(data=mesh, batch_dim=lambda shape: len(shape) - 1):
        torch.manual_seed(5)
        mask = F.dropout(torch.ones(3, mine.stop - mine.start))
    torch.manual_seed(5)
    return same, torch.equal(mask, F.dropout(torch.ones(3, 7))[:, mine])


def test_another_dim_is_the_batch():
    assert run(other_dims, ranks=2) == [(True, True)] * 2


def dtensors(rank, world):
    """DTensors on the tp axis are rows; those on a mesh with the data axis are global already."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    data = rank // 2
    mine, wrong = rows_of(5, 2, data), []
    for name in (
        "dropout",
        "alpha_dropout",
        "randn_like",
        "normal_",
        "bernoulli",
        "gumbel_softmax",
    ):
        for placement in (Replicate(), Shard(1), Shard(0)):
            torch.manual_seed(5)
            expected = EVERYWHERE[name](sample(5))
            after = torch.get_rng_state()
            local = DTensor.from_local(sample(5)[mine], mesh["tp"], [Replicate()])
            torch.manual_seed(5)
            with consistent(data=mesh["dp"]):
                found = EVERYWHERE[name](local.redistribute(placements=[placement]))
            if not torch.equal(found.full_tensor(), expected[mine]):
                wrong.append((name, placement))
            if not torch.equal(torch.get_rng_state(), after):
                wrong.append((name, placement, "generator"))
    torch.manual_seed(5)
    expected = torch.empty(5, 4).normal_()
    weight = nn.Parameter(DTensor.from_local(torch.empty(5, 2), mesh["tp"], [Shard(1)]))
    both = DTensor.from_local(
        torch.empty(3 - data, 2), mesh, [Shard(0), Shard(1)], shape=(5, 4), stride=(4, 1)
    )
    with consistent(data=mesh["dp"]):
        for tensor in (weight, both):
            torch.manual_seed(5)
            nn.init.normal_(tensor)
            if not torch.equal(tensor.full_tensor(), expected):
                wrong.append(("whole", tensor.placements))
    return wrong


def test_dtensors_with_and_without_the_data_axis():
    assert run(dtensors) == [[]] * RANKS


def parameters(rank, world):
    """What is a parameter, or like one, is drawn whole: as by stock torch."""

    def make():
        torch.manual_seed(5)
        linear = nn.Linear(4, 3)
        nn.init.orthogonal_(linear.weight)
        nn.init.trunc_normal_(linear.weight, std=1.0)
        linear.weight.data.normal_(0.0, 0.02)
        linear.weight.data[1:].uniform_()
        linear.bias.detach().uniform_()
        noise = torch.randn_like(linear.weight) + torch.empty_like(linear.weight).normal_()
        linear.weight.grad = torch.ones(3, 4)
        noise = noise + torch.randn_like(linear.weight.grad)
        seed = torch.empty((), dtype=torch.int64).random_()
        return linear.weight.detach(), linear.bias.detach(), noise, seed, torch.rand(())

    mesh = init_device_mesh("cpu", (world,))
    expected = make()
    with consistent(data=mesh):
        found = make()
        order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
        with consistent(data=None):
            table = torch.rand(2, 3)
            again = F.dropout(torch.ones(2, 3))
    same = [torch.equal(a, b) for a, b in zip(found, expected, strict=True)]
    same.append(torch.equal(order, torch.randperm(9, generator=torch.Generator().manual_seed(1))))
    make()
    same += [torch.equal(table, torch.rand(2, 3)), torch.equal(again, F.dropout(torch.ones(2, 3)))]
    # Functions of this package know their layout, inside as outside.
    torch.manual_seed(5)
    expected = torch.empty(9).normal_(), torch.rand(1)
    torch.manual_seed(5)
    with consistent(data=mesh, factories="whole"):
        mine = fill_(torch.empty(9), Normal(), whole((9,)))
        same += [torch.equal(mine, expected[0]), torch.equal(torch.rand(1), expected[1])]
        advance(10)
    return same


def test_parameters_and_what_is_said_to_be_whole():
    assert all(all(same) for same in run(parameters, ranks=2))


def made(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    mine = rows_of(7, world, rank)
    size = mine.stop - mine.start
    torch.manual_seed(5)
    expected = (
        torch.rand(7, 1, 1),
        torch.randn(7, 2, dtype=torch.float64),
        torch.randint(3, 9, (7,)),
        torch.normal(1.0, 2.0, (7, 3)),
    )
    torch.manual_seed(5)
    with consistent(data=mesh, factories="rows"):
        found = (
            torch.rand(size, 1, 1),
            torch.randn(size, 2, dtype=torch.float64),
            torch.randint(3, 9, (size,)),
            torch.normal(1.0, 2.0, (size, 3)),
        )
    return [torch.equal(a, b[mine]) for a, b in zip(found, expected, strict=True)]


def test_factories_of_rows():
    assert all(all(same) for same in run(made))


def forked(rank, world):
    """Draw in a fork, as a worker of a DataLoader does: it has the modes, and is no rank."""
    mesh = init_device_mesh("cpu", (world,))
    with consistent(data=mesh):
        child = os.fork()
        if not child:
            torch.ones(3).normal_(), torch.rand(3), F.dropout(torch.ones(0, 3))
            os._exit(7)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_workers_of_a_loader_are_no_ranks():
    assert run(forked, ranks=2) == [7, 7]


def test_blocks_of_threads_end_in_any_order():
    handlers = DTensor._op_dispatcher._custom_op_handlers
    before = dict(handlers)
    opened, close = threading.Event(), threading.Event()

    def other():
        with consistent():
            opened.set()
            close.wait(30)

    thread = threading.Thread(target=other)
    with consistent():
        thread.start()
        opened.wait(30)
    # The other thread's block is open still.
    assert handlers != before
    close.set()
    thread.join()
    assert handlers == before


def test_simulated_ranks_do_the_same():
    simulate = pytest.importorskip("vescale_comm", reason="vescale-comm is not installed").simulate
    mine = ["dropout", "randn_like", "attention", "bernoulli"]
    found = simulate(3).run(lambda rank, world: differences(mine, EVERYWHERE, 7, rank, world))
    assert found == [[]] * 3


def after_a_draw_of_this_package(rank, world):
    """Rows of a later draw; `trunc_normal_` tries torch's own at its first use, inside of ours."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    _way.cache_clear()
    torch.manual_seed(0)
    with consistent(data=mesh["dp"]):
        trunc_normal_(torch.empty(4), layout=whole((4,)))
        return torch.rand_like(torch.zeros(2, 3))


def test_draws_of_this_package_leave_later_draws_to_the_block():
    torch.manual_seed(0)
    torch.nn.init.trunc_normal_(torch.empty(4))
    expected = torch.rand(4, 3)
    assert torch.equal(torch.cat(run(after_a_draw_of_this_package, ranks=2)), expected)
