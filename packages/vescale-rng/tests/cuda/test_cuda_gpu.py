"""Property: on a GPU, pieces are the bytes that torch draws there, and generators end where its do.

Runs by one command, `nox -s gpu`, and prints a table. Where there is no GPU, all but the printing
of the table is skipped; that is tried on the numpy model.
"""

import warnings

import pytest
import torch
from cuda_model import ModelDevice
from cuda_table import KINDS, lines, sizes_of, table
from rng_cases import FLOATS, Shard, boxes_of, strided
from torch.nn import functional
from vescale_rng import (
    Bernoulli,
    BernoulliOf,
    DistributionError,
    Dropout,
    GraphGenerator,
    Normal,
    RandInt,
    Uniform,
    bernoulli_,
    draws,
    dropout,
    fill_,
    layout_of,
    native_dropout,
    position,
    skip,
    threads_of,
    whole,
)
from vescale_rng._cuda import map_check
from vescale_rng._cuda.kernels import have_triton
from vescale_rng._cuda.recipes import recipe_of

HAVE = torch.cuda.is_available()
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not HAVE, reason="this machine has no CUDA device")]


@pytest.fixture
def gpu():
    return torch.device("cuda", torch.cuda.current_device())


def gpu_test(function):
    for mark in on_gpu:
        function = mark(function)
    return function


def test_the_table_can_be_printed_without_a_gpu(monkeypatch):
    monkeypatch.setattr(map_check, "have_triton", lambda: False)
    device = ModelDevice(256)
    rows = table(device, [KINDS[0], KINDS[5]])
    assert [row[2] for row in rows] == ["kernel", "waves"] * 2
    assert all(at is None for row in rows for at in row[4])
    text = list(lines(device, rows))
    assert "triton is not installed" in text[2]
    assert text[3].count("equal") == len(sizes_of(256))


@gpu_test
@pytest.mark.timeout(1800)  # Some hundred kernels are compiled.
def test_every_distribution_on_every_dtype_around_every_boundary(gpu, capsys):
    device = map_check.cuda_device(gpu.index)
    rows = table(device)
    with capsys.disabled():
        print("", *lines(device, rows), sep="\n")
    wrong = [row for row in rows if any(at is not None for at in row[4])]
    assert not wrong


@gpu_test
@pytest.mark.skipif(not have_triton(), reason="triton is not installed")
@pytest.mark.parametrize(("distribution", "dtype"), KINDS, ids=str)
def test_the_kernel_gives_torchs_bits_where_there_is_one(gpu, distribution, dtype):
    # Where it does not, torch draws the pieces itself: right, but an error of the kernel.
    recipe = recipe_of(distribution, dtype)
    if recipe.kind is None:
        pytest.skip("there is no kernel for it")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            route = map_check.routes_of(gpu.index).route(distribution, dtype)
        except DistributionError as error:
            pytest.skip(f"torch itself cannot draw it: {error}")
    assert route.kernel, route.why


@gpu_test
@pytest.mark.parametrize("order", [None, (1, 0), (2, 0, 1)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_pieces_of_any_layout_and_the_generator(gpu, dtype, order):
    shape = (401, 1033) if order is None or len(order) == 2 else (37, 41, 301)
    placements = [Shard(0), Shard(1)]
    for distribution in (Uniform(-1.0, 2.0), Normal(), Bernoulli(0.3), RandInt(-3, 100)):
        torch.cuda.manual_seed(77)
        torch.rand(3, device=gpu)
        before = torch.cuda.get_rng_state(gpu)
        expected = strided(shape, order, dtype).to(gpu)
        distribution.draw(expected, None)
        after = torch.cuda.get_rng_state(gpu)
        following = torch.rand(5, device=gpu)
        for rank in range(6):
            layout = layout_of(shape, placements, (3, 2), (rank // 2, rank % 2), memory_order=order)
            local = strided(layout.local_shape, order, dtype).to(gpu)
            torch.cuda.set_rng_state(before, gpu)
            fill_(local, distribution, layout)
            assert torch.equal(torch.cuda.get_rng_state(gpu), after)
            assert all(torch.equal(view, expected[at]) for at, view in boxes_of(local, layout))
            assert torch.equal(torch.rand(5, device=gpu), following)


@gpu_test
def test_how_far_an_op_goes_is_known_without_running_it(gpu):
    generator = torch.Generator(gpu).manual_seed(5)
    threads = threads_of(gpu)
    for size in (1, threads, 4 * threads, 4 * threads + 1, 20 * threads + 777):
        for distribution, dtype in ((Normal(), torch.float32), (Uniform(), torch.float64)):
            start = position(generator)
            distribution.draw(torch.empty(size, dtype=dtype, device=gpu), generator)
            moved = position(generator).offset - start.offset
            assert draws(distribution, (size,), dtype, device=gpu) == moved
            before = position(generator).offset
            skip(distribution, (size,), dtype, generator=generator)
            assert position(generator).offset == before + moved
        start = position(torch.cuda.default_generators[gpu.index])
        functional.dropout(torch.ones(size, device=gpu), 0.5)
        end = position(torch.cuda.default_generators[gpu.index])
        assert draws(Dropout(), (size,), device=gpu) == end.offset - start.offset
        start = end
        torch.bernoulli(torch.full((size,), 0.5, device=gpu))
        end = position(torch.cuda.default_generators[gpu.index])
        assert draws(BernoulliOf(), (size,), device=gpu) == end.offset - start.offset


@gpu_test
@pytest.mark.parametrize("order", [None, (1, 0)])
@pytest.mark.parametrize("columns", [1033, 1034, 1036, 1040])
@pytest.mark.parametrize("dtype", FLOATS)
def test_dropout_is_that_of_one_device_forward_and_backward(gpu, dtype, columns, order):
    shape = (2001, columns)
    torch.cuda.manual_seed(3)
    x = strided(shape, order, dtype).to(gpu).normal_().requires_grad_()
    gradient = torch.randn_like(x)
    before = torch.cuda.get_rng_state(gpu)
    expected = functional.dropout(x, 0.1)
    after = torch.cuda.get_rng_state(gpu)
    (expected_grad,) = torch.autograd.grad(expected, x, gradient)
    torch.cuda.set_rng_state(before, gpu)
    expected_mask = torch.native_dropout(x, 0.1, True)[1]
    for rank in range(4):
        layout = layout_of(
            shape, [Shard(0), Shard(1)], (2, 2), (rank // 2, rank % 2), memory_order=order
        )
        local = strided(layout.local_shape, order, dtype).to(gpu)
        ((at, view),) = boxes_of(local, layout)
        view.copy_(x.detach()[at])
        local.requires_grad_()
        torch.cuda.set_rng_state(before, gpu)
        result = dropout(local, 0.1, layout)
        assert torch.equal(torch.cuda.get_rng_state(gpu), after)
        (grad,) = torch.autograd.grad(result, local, gradient[at].clone())
        assert torch.equal(result, expected[at])
        assert torch.equal(grad, expected_grad[at])
        torch.cuda.set_rng_state(before, gpu)
        assert torch.equal(native_dropout(local, 0.1, True, layout)[1], expected_mask[at])


@gpu_test
@pytest.mark.parametrize("dtype", [*FLOATS, torch.bool, torch.int64])
def test_tensors_of_probabilities(gpu, dtype):
    p = torch.rand(1001, 517, device=gpu, dtype=torch.float64)
    generator = torch.Generator(gpu).manual_seed(9)
    expected = torch.empty(1001, 517, dtype=dtype, device=gpu).bernoulli_(p, generator=generator)
    for rank in range(3):
        layout = layout_of((1001, 517), [Shard(1)], (3,), (rank,))
        local = torch.empty(layout.local_shape, dtype=dtype, device=gpu)
        ((at, view),) = boxes_of(local, layout)
        mine = torch.Generator(gpu).manual_seed(9)
        bernoulli_(local, p[at].contiguous(), layout, mine)
        assert torch.equal(view, expected[at])
        assert position(mine) == position(generator)


@gpu_test
def test_a_captured_graph_goes_on_with_the_stream(gpu):
    layout = layout_of((3000, 1001), [Shard(1)], (2,), (1,))
    generator = torch.Generator(gpu).manual_seed(11)
    local = torch.empty(layout.local_shape, device=gpu)
    x = torch.ones(layout.local_shape, device=gpu)
    # A warm-up, as for any capture: every kind of op runs once.
    elsewhere = GraphGenerator.of(torch.Generator(gpu).manual_seed(0))
    fill_(local, Normal(), layout, elsewhere)
    dropout(x, 0.5, layout, elsewhere)
    in_memory = GraphGenerator.of(generator)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fill_(local, Normal(), layout, in_memory)
        dropped = dropout(x, 0.5, layout, in_memory)
    for _ in range(3):
        graph.replay()
        expected = torch.empty(3000, 1001, device=gpu).normal_(generator=generator)
        ((at, view),) = boxes_of(local, layout)
        assert torch.equal(view, expected[at])
        # Dropout draws from the default generator only.
        with torch.random.fork_rng([gpu]):
            default = torch.cuda.default_generators[gpu.index]
            default.set_state(generator.get_state())
            kept = functional.dropout(torch.ones(3000, 1001, device=gpu), 0.5)
            generator.set_state(default.get_state())
        assert torch.equal(dropped, kept[at])
    assert in_memory.position() == position(generator)


@gpu_test
def test_finding_out_about_a_device_disturbs_no_generator(gpu):
    torch.cuda.manual_seed(1)
    before = torch.cuda.get_rng_state(gpu), torch.get_rng_state()
    device = map_check.cuda_device(gpu.index)
    map_check.Routes(device).route(Normal(), torch.float32)
    local = torch.empty(0, 7, device=gpu)
    fill_(local, Normal(), layout_of((3, 7), [Shard(0)], (4,), (3,)), torch.Generator(gpu))
    dropout(torch.ones(9, device=gpu), 0.5, whole((9,)), torch.Generator(gpu))
    after = torch.cuda.get_rng_state(gpu), torch.get_rng_state()
    assert all(map(torch.equal, before, after))


@gpu_test
def test_a_tensor_that_is_drawn_in_several_launches(gpu):
    size = 2**29 + 12_345
    if torch.cuda.mem_get_info(gpu)[0] < 3 * 4 * size:
        pytest.skip("needs 7 GB of free memory on the device")
    generator = torch.Generator(gpu).manual_seed(2)
    expected = torch.empty(size, device=gpu).uniform_(generator=generator)
    for rank in (0, 3, 4, 7):
        # The seam of the two launches lies between ranks 3 and 4 of 8, and inside rank 1 of 3.
        layout = layout_of((size,), [Shard(0)], (8,), (rank,))
        local = torch.empty(layout.local_shape, device=gpu)
        mine = torch.Generator(gpu).manual_seed(2)
        fill_(local, Uniform(), layout, mine)
        ((at, view),) = boxes_of(local, layout)
        assert torch.equal(view, expected[at])
        assert position(mine) == position(generator)
    layout = layout_of((size,), [Shard(0)], (3,), (1,))
    local = torch.empty(layout.local_shape, device=gpu)
    fill_(local, Uniform(), layout, torch.Generator(gpu).manual_seed(2))
    ((at, view),) = boxes_of(local, layout)
    assert torch.equal(view, expected[at])
