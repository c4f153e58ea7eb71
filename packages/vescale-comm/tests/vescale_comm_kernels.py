"""What the Triton kernels of the wire formats give beside torch. Also read by `tools/first_gpu`.

Each function gives pairs by name: what is expected, on the host, and what a kernel gave.
"""

import torch
from vescale_comm._wire import fold, formats
from vescale_comm._wire.formats import BLOCK


def values(numel, seed):
    """Magnitudes of many orders, exact halves, zeros of both signs, and whole blocks of zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator) * torch.randn(numel, generator=generator).exp2() * 8
    x[::7] = (x[::7] * 2).round() / 2
    x[3::11] = -0.0
    x[BLOCK : 2 * BLOCK] = 0
    return x


def quantised(wire, device):
    """Scales and values (as bytes) of sizes around the boundaries of blocks."""
    from vescale_comm._wire import kernels

    for numel in (0, 1, 255, 256, 257, 3000):
        x = values(numel, numel)
        scales, found = kernels.quantise(x.to(device), wire)
        expected_scales, expected = formats.quantise(x, wire)
        yield f"scales of {numel}", expected_scales, scales.cpu()
        yield f"values of {numel}", expected.view(torch.uint8), found.cpu().view(torch.uint8)


def folded(device):
    """Sums of several members."""
    from vescale_comm._wire import kernels

    for members in (1, 2, 5):
        for numel in (1, 256, 1000):
            rows = [formats.quantise(values(numel, seed), "int8") for seed in range(members)]
            scales = torch.stack([s for s, _ in rows])
            data = torch.stack([v for _, v in rows])
            assert scales.shape == (members, formats.blocks(numel))
            found = kernels.fold(scales.to(device), data.to(device)).cpu()
            expected = fold.fold([formats.dequantise(s, v) for s, v in rows], torch.add, "rank")
            yield f"{numel} elements of {members}", expected, found


def not_finite(device):
    """Blocks with a value that is not finite are NaN, by the kernel and by torch; others stay."""
    from vescale_comm._wire import kernels

    for bad in (float("inf"), float("-inf"), float("nan")):
        x = torch.ones(600)
        x[300] = bad
        expected = torch.ones(600)
        expected[BLOCK : 2 * BLOCK] = float("nan")
        scales, found = kernels.quantise(x.to(device), "int8")
        yield f"{bad}", expected, formats.dequantise(scales.cpu(), found.cpu())
        yield f"{bad}, by torch", expected, formats.dequantise(*formats.quantise(x, "int8"))
