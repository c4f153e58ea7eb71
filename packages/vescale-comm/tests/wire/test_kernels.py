"""The Triton kernels have the bits of the torch path, on the CPU (interpreted) and on a GPU."""

import os

import pytest
import torch
from vescale_comm._wire.fold import fold
from vescale_comm._wire.formats import BLOCK, blocks, dequantise, quantise

pytest.importorskip("triton", reason="triton is not installed")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def device():
    if torch.cuda.is_available() and not INTERPRETED:
        return "cuda"
    if INTERPRETED:
        return "cpu"
    pytest.skip("needs TRITON_INTERPRET=1, or a GPU")


def values(numel, seed):
    """Magnitudes of many orders, exact halves, zeros of both signs, and whole blocks of zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator) * torch.randn(numel, generator=generator).exp2() * 8
    x[::7] = (x[::7] * 2).round() / 2
    x[3::11] = -0.0
    x[BLOCK : 2 * BLOCK] = 0
    return x


@pytest.mark.kernels
@pytest.mark.gpu
@pytest.mark.parametrize("wire", ["int8", "fp8"])
@pytest.mark.parametrize("numel", [0, 1, 255, 256, 257, 3000])
def test_quantise_has_the_bits_of_torch(wire, numel):
    from vescale_comm._wire import kernels

    where = device()
    if wire == "fp8" and where == "cpu":
        pytest.skip("the interpreter rounds to fp8 in numpy, which has no such dtype")
    x = values(numel, numel)
    scales, found = kernels.quantise(x.to(where), wire)
    expected_scales, expected = quantise(x, wire)
    assert torch.equal(scales.cpu(), expected_scales)
    assert torch.equal(found.cpu().view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.kernels
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, in the interpreter
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_block_that_is_not_finite_has_no_finite_scale(bad):
    from vescale_comm._wire import kernels

    x = torch.ones(600)
    x[300] = bad
    scales, found = kernels.quantise(x.to(device()), "int8")
    decoded = dequantise(scales.cpu(), found.cpu())
    assert decoded[256:512].isnan().all()
    assert decoded[:256].eq(1).all()
    decoded = dequantise(*quantise(x, "int8"))
    assert decoded[256:512].isnan().all(), "torch's path"
    assert decoded[:256].eq(1).all()


@pytest.mark.kernels
@pytest.mark.gpu
@pytest.mark.parametrize("members", [1, 2, 5])
@pytest.mark.parametrize("numel", [1, 256, 1000])
def test_fold_has_the_bits_of_torch(members, numel):
    from vescale_comm._wire import kernels

    where = device()
    rows = [quantise(values(numel, seed), "int8") for seed in range(members)]
    scales = torch.stack([s for s, _ in rows])
    data = torch.stack([v for _, v in rows])
    assert scales.shape == (members, blocks(numel))
    found = kernels.fold(scales.to(where), data.to(where)).cpu()
    expected = fold([dequantise(s, v) for s, v in rows], torch.add, "rank")
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
