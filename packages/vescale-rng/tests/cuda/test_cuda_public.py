"""Property: the public functions draw CUDA tensors as one device does, and move its generator.

No GPU: the functions are told that CPU tensors are CUDA ones, and a model device draws by waves.
"""

import pytest
import torch
from cuda_model import ModelDevice, kept
from cuda_shards import global_draw
from cuda_stand_in import StandInGenerator, stand_in
from rng_pieces import Shard, boxes_of
from vescale_rng import (
    DeviceError,
    DistributionError,
    Normal,
    RngError,
    StateError,
    Uniform,
    bernoulli_,
    dropout,
    fill_,
    layout_of,
    native_dropout,
    randn,
)
from vescale_rng._cuda import bernoulli as cuda_bernoulli
from vescale_rng._cuda import dropout_check, map_check
from vescale_rng._cuda.bernoulli import BernoulliRoutes
from vescale_rng._cuda.dropout_check import DropoutRoutes
from vescale_rng._cuda.dropout_map import scales, threshold
from vescale_rng._cuda.map_check import Routes
from vescale_rng.cuda import CudaPosition, GraphGenerator, use_threads
from vescale_rng.streams import (
    BernoulliOf,
    Dropout,
    Multinomial,
    advance,
    at,
    draws,
    position,
    seek,
    skip,
)

DEVICE = ModelDevice(256)
START = CudaPosition(99, 400)


@pytest.fixture(autouse=True)
def _device(monkeypatch):
    for module in (map_check, dropout_check, cuda_bernoulli):
        monkeypatch.setattr(module, "have_triton", lambda: False)
    with stand_in(DEVICE, Routes(DEVICE), DropoutRoutes(DEVICE), BernoulliRoutes(DEVICE)):
        yield


@pytest.fixture
def generator():
    return StandInGenerator(START.seed, START.offset)


@pytest.mark.parametrize("rank", range(4))
def test_fill_and_factories(generator, rank):
    layout = layout_of((3, 1500), [Shard(0)], (4,), (rank,))
    expected, end = global_draw(DEVICE, Normal(), (3, 1500), None, torch.float32, START)
    local = fill_(torch.empty(layout.local_shape), Normal(), layout, generator)
    assert all(torch.equal(view, expected[where]) for where, view in boxes_of(local, layout))
    assert generator.place == CudaPosition(START.seed, end)
    seek_back = StandInGenerator(START.seed, START.offset)
    assert torch.equal(randn(layout, generator=seek_back), local)


def test_an_empty_tensor_draws_nothing_and_moves_nothing(generator):
    layout = layout_of((0, 5), [Shard(1)], (2,), (1,))
    fill_(torch.empty(layout.local_shape), Normal(), layout, generator)
    assert generator.place == START


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("columns", [1500, 1501, 1504])
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_multiplies_by_what_the_fused_kernel_does(generator, dtype, columns, p):
    shape = (3, columns)
    x = torch.linspace(-3, 3, 3 * columns, dtype=torch.float64).to(dtype).view(shape)
    gradient = x.flip(0)
    mask, end = kept(x, p, 16 // x.element_size(), 256, START.seed, START.offset)
    mask = mask.view(shape)
    # As in Dropout.cu: the kept probability is rounded before it is inverted, in the forward pass.
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    keep = torch.tensor(1 - p, dtype=wide).double().item()
    expected = (x.to(wide) * mask * torch.tensor(1 / keep, dtype=wide)).to(dtype)
    expected_grad = (gradient.to(wide) * mask * torch.tensor(1 / (1 - p), dtype=wide)).to(dtype)
    layout = layout_of(shape, [Shard(1)], (2,), (1,))
    ((where, _),) = boxes_of(torch.empty(layout.local_shape), layout)
    local = x[where].clone().requires_grad_()
    result = dropout(local, p, layout, generator)
    assert generator.place == CudaPosition(START.seed, end)
    (found,) = torch.autograd.grad(result, local, gradient[where].contiguous())
    # The device's own arithmetic is compared on a GPU; torch's on CPU rounds once more often.
    close = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 0}
    torch.testing.assert_close(result, expected[where], **close)
    torch.testing.assert_close(found, expected_grad[where], **close)
    assert torch.equal(result != 0, (expected != 0)[where])
    again = StandInGenerator(START.seed, START.offset)
    assert torch.equal(native_dropout(local, p, True, layout, again)[1], mask[where])


def test_the_scales_of_dropout_round_as_the_device_rounds_them():
    for p in (0.1, 0.3, 0.7, 1 / 3):
        forward, backward = scales(p, torch.bfloat16)
        keep = torch.tensor(1 - p, dtype=torch.float32).item()
        assert (forward, backward) == (1 / keep, 1 / (1 - p))
        assert scales(p, torch.float64) == (1 / (1 - p), 1 / (1 - p))


def test_the_threshold_of_fp64_is_the_same_question_in_fp32():
    for p in torch.rand(200, dtype=torch.float64).tolist():
        least = threshold(p, torch.float64)
        below = torch.nextafter(torch.tensor(least), torch.tensor(0.0)).item()
        # No fp32 number lies between the probability and the threshold.
        assert below < 1 - p <= least
        assert threshold(p, torch.float32) == torch.tensor(1 - p, dtype=torch.float32).item()


def test_dropout_of_everything_and_of_nothing(generator):
    layout = layout_of((8,), [Shard(0)], (2,), (1,))
    local = torch.ones(4)
    assert torch.equal(dropout(local, 1.0, layout, generator), torch.zeros(4))
    assert torch.equal(dropout(local, 0.0, layout, generator), local)
    assert generator.place == START


def test_tensors_of_probabilities_need_the_kernel(generator):
    layout = layout_of((8,), [Shard(0)], (2,), (1,))
    with pytest.raises(DeviceError, match="triton is not installed"):
        bernoulli_(torch.empty(4), torch.full((4,), 0.5), layout, generator)
    assert generator.place == START


def test_an_order_that_depends_on_the_whole_probabilities_is_refused(generator):
    layout = layout_of((8, 9), [Shard(0)], (2,), (1,), memory_order=(1, 0))
    local = torch.empty(9, 4).t()
    with pytest.raises(DeviceError, match="memory order"):
        bernoulli_(local, torch.full((4, 9), 0.5), layout, generator)


def test_a_generator_in_a_capture_is_refused_in_words(generator):
    layout = layout_of((8,), [Shard(0)], (2,), (1,))
    generator.capturing = True
    with pytest.raises(DeviceError, match="GraphGenerator"):
        fill_(torch.empty(4), Normal(), layout, generator)


def test_a_generator_in_memory_needs_the_kernel():
    layout = layout_of((8,), [Shard(0)], (2,), (1,))
    memory = GraphGenerator(torch.tensor([1]), torch.tensor([4]))
    with pytest.raises(DeviceError, match="GraphGenerator"):
        fill_(torch.empty(4), Normal(), layout, memory)
    with pytest.raises(DeviceError, match="GraphGenerator"):
        dropout(torch.ones(4), 0.5, layout, memory)
    assert memory.position() == CudaPosition(1, 4)


def test_a_generator_in_memory_is_two_integers():
    with pytest.raises(StateError, match="offset"):
        GraphGenerator(torch.tensor([1]), torch.tensor([4.0]))
    meta = torch.empty(1, dtype=torch.int64, device="meta")
    with pytest.raises(DeviceError, match="one device"):
        GraphGenerator(torch.tensor([1]), meta)
    there = StandInGenerator(2**64 - 3, 8)
    memory = GraphGenerator.of(there)
    assert memory.position() == CudaPosition(2**64 - 3, 8)
    back = StandInGenerator()
    memory.return_to(back)
    assert back.place == there.place


def test_a_generator_of_another_device_is_refused():
    with pytest.raises(DeviceError, match="`generator`: one on cuda:1"):
        fill_(torch.empty(4), Normal(), None, StandInGenerator(device="cuda:1"))


def test_places_of_a_cuda_generator():
    generator = StandInGenerator(7, 12, "cuda:0")
    place = position(generator)
    assert place == CudaPosition(7, 12)
    advance(8, generator)
    assert position(generator) == place.after(8)
    with at(CudaPosition(8, 4), generator):
        assert generator.place == CudaPosition(8, 4)
    assert position(generator) == place.after(8)
    with pytest.raises(StateError, match="multiple of 4"):
        seek(CudaPosition(7, 2), generator)
    with pytest.raises(DeviceError, match="CudaPosition"):
        seek(place)
    with pytest.raises(DeviceError, match="Position"):
        seek(position(), generator)
    with pytest.raises(RngError, match="no way back"):
        place.after(-4)


def test_how_far_ops_go_on_cuda():
    cuda = torch.device("cuda", 0)
    use_threads(512, cuda)
    try:
        assert draws(Normal(), (2048,), device=cuda) == 4
        assert draws(Normal(), (2049,), device="cuda:0") == 8
        assert draws(Normal(), (2048,), torch.float64, device=cuda) == 8
        assert draws(Dropout(), (2048,), torch.float64, device=cuda) == 4
        assert draws(BernoulliOf(), (10**6,), device=cuda) == 12
        assert draws(Uniform(), (0,), device=cuda) == 0
        with pytest.raises(DistributionError, match="cpu only"):
            draws(Multinomial(3), (4, 5), device=cuda)
        generator = StandInGenerator(1, 0, "cuda:0")
        skip(Normal(), (2049,), generator=generator)
        assert generator.place.offset == 8
    finally:
        use_threads(None, cuda)
    with pytest.raises(DeviceError, match="multiple of 256"):
        use_threads(100, cuda)
