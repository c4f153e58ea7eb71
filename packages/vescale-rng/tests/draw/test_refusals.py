"""Property: a wrong layout, dtype, device or policy is one clear error, and nothing is drawn."""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode
from vescale_rng import (
    Bernoulli,
    Box,
    DeviceError,
    DistributionError,
    Exponential,
    LayoutError,
    LogNormal,
    Normal,
    PolicyError,
    RandInt,
    RngError,
    ShardLayout,
    Uniform,
    dropout,
    fill_,
    policy,
    use,
    whole,
)


def layout(*boxes, shape=(4, 6), order=None):
    return ShardLayout(shape, tuple(Box(*box) for box in boxes), memory_order=order)


LEFT = ((0, 0), (4, 3), 0, (3, 1))
RIGHT = ((0, 3), (4, 3), 12, (3, 1))

WRONG_LAYOUTS = [
    (object(), (4, 3), "not a layout"),
    (SimpleNamespace(global_shape=(4, 6), boxes=[object()]), (4, 3), "global_offset"),
    (SimpleNamespace(global_shape=4, boxes=[]), (0,), "not a layout"),
    (layout(((0, 4), (4, 3), 0, (3, 1))), (4, 3), "leaves the tensor of shape (4, 6)"),
    (layout(((-1, 0), (4, 3), 0, (3, 1))), (4, 3), "leaves the tensor"),
    (layout(((0,), (4,), 0, (1,))), (4,), "does not have the 2 dims"),
    (layout(LEFT, ((0, 2), (4, 3), 12, (3, 1))), (8, 3), "overlap"),
    (layout(*[((0, i), (4, 1), 4 * i, (1, 4)) for i in (0, 5, 2, 4, 2)]), (4, 5), "overlap"),
    (layout(((0, 0), (4, 6), 0, (6, 1)), ((3, 5), (1, 1), 24, (1, 1))), (25,), "overlap"),
    (layout(LEFT, order=(0, 0)), (4, 3), "each dim"),
    (layout(shape=(4, -6)), (0,), "negative"),
    (layout(((0, 0), (4, 3), 11, (-3, 1))), (4, 3), "negative local strides"),
    (layout(LEFT), (4, 4), "hold 12 elements, the local tensor of shape (4, 4) has 16"),
    (layout(), (4, 3), "hold 0 elements"),
    (layout(LEFT), (0,), "has 0"),
    (layout(LEFT, (*RIGHT[:2], 11, (3, 1))), (8, 3), "exactly once"),
    (layout(LEFT, (*RIGHT[:2], 13, (3, 1))), (8, 3), "leaves the local tensor"),
    (layout(LEFT, (*RIGHT[:2], -1, (3, 1))), (8, 3), "leaves the local tensor"),
    (layout((*LEFT[:3], (3, 0))), (4, 3), "exactly once"),
]


@pytest.mark.parametrize(("wrong", "shape", "words"), WRONG_LAYOUTS)
def test_a_wrong_layout_is_refused(wrong, shape, words):
    before = torch.get_rng_state()
    for call in (
        lambda: fill_(torch.empty(shape), Uniform(), wrong),
        lambda: dropout(torch.empty(shape), 0.5, wrong),
    ):
        with pytest.raises(LayoutError) as caught:
            call()
        assert words in str(caught.value)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_local_tensor_whose_elements_share_memory_is_refused():
    shared = torch.empty(4, 1).expand(4, 3)
    with pytest.raises(LayoutError, match="exactly once"):
        fill_(shared, Uniform(), layout(((0, 0), (4, 3), 0, (1, 0)), shape=(4, 3)))


WRONG_DRAWS = [
    (Normal(0.0, -1.0), torch.float32, "std"),
    (Normal(), torch.int64, "int64"),
    (Uniform(1.0, 0.0), torch.float32, "uniform_"),
    (Uniform(), torch.bool, "bool"),
    (Bernoulli(1.5), torch.float32, "1.5"),
    (Bernoulli(float("nan")), torch.float32, "nan"),
    (RandInt(5, 5), torch.int64, "torch says"),
    (RandInt(0, 1000), torch.uint8, "out of bounds"),
    (Exponential(-1.0), torch.float32, "lambda"),
    (LogNormal(0.0, 0.0), torch.float32, "std"),
    (Normal(), torch.float8_e4m3fn, "float8"),
]


@pytest.mark.parametrize(("distribution", "dtype", "words"), WRONG_DRAWS)
@pytest.mark.parametrize("shape", [(8,), (0,)])
def test_what_torch_refuses_is_refused_on_every_rank(distribution, dtype, words, shape):
    before = torch.get_rng_state()
    # Two elements on one rank, none on another: the same answer.
    for local, boxes in ((2, (Box((0,), (2,), 0, (1,)),)), (0, ())):
        boxes = boxes if shape[0] else ()
        with pytest.raises(DistributionError, match=words):
            fill_(
                torch.empty(local if shape[0] else 0, dtype=dtype),
                distribution,
                ShardLayout(shape, boxes),
            )
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan")])
def test_dropout_takes_a_probability(p):
    with pytest.raises(DistributionError, match="`p`: a probability, a number from 0 to 1"):
        dropout(torch.ones(4), p, whole((4,)))


def test_dropout_takes_floats():
    with pytest.raises(DistributionError, match="int64"):
        dropout(torch.ones(4, dtype=torch.int64), 0.5, whole((4,)))


@pytest.mark.parametrize("shape", [(3,), (0,)])
@pytest.mark.parametrize(("device", "words"), [("cuda", "CUDA is not"), ("meta", "cpu")])
def test_another_device_is_refused_and_never_drawn_locally(device, words, shape):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("here CUDA tensors are drawn")
    with FakeTensorMode():
        elsewhere = torch.empty(shape, device=device)
    for call in (
        lambda: fill_(elsewhere, Uniform(), whole(shape)),
        lambda: dropout(elsewhere, 0.5, whole(shape)),
        lambda: dropout(elsewhere, 0.0, whole(shape)),
    ):
        with pytest.raises(DeviceError, match=words):
            call()


def test_a_generator_of_another_device_is_refused():
    elsewhere = SimpleNamespace(device=torch.device("cuda", 0))
    with pytest.raises(DeviceError, match="`generator`: one on cuda:0"):
        fill_(torch.empty(3), Uniform(), whole((3,)), elsewhere)


def test_unknown_policies_are_refused():
    with pytest.raises(PolicyError, match="'fast'"), use("fast"):
        pass
    with use("native"):
        assert policy() == "native"


def test_one_base_catches_all():
    for error in (DeviceError, DistributionError, LayoutError, PolicyError):
        assert issubclass(error, RngError)
