"""Results lie in the memory order of one device, so what is drawn behind them is the same.

Of all ops, in all memory formats, `-m slow` takes what the first test leaves out; a failure names
the op, which `memory_formats.judge(name, 0)` runs again.
"""

from __future__ import annotations

import zlib
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import vescale_dtensor as vd
from memory_formats import judge, lying, names
from on_mesh import on_mesh
from torch import nn
from vescale_comm import simulate
from vescale_comm.testing import device_mesh
from vescale_dtensor import Replicate, Shard
from vescale_dtensor._planning import memory_order

SHARE = 100  # one entry out of so many: half a dozen


def told(found):
    return "\n".join(f"{trial}: {words}" for trial, words in found[:20])


@pytest.mark.timeout(600)
def test_results_of_a_part_of_all_ops():
    part = [name for name in names() if zlib.crc32(name.encode()) % SHARE == 0]
    found = [problem for name in part for problem in judge(name, 0, most=2)]
    assert part
    assert not found, told(found)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(8))
def test_results_of_all_ops(part):
    found = [problem for name in names()[part::8] for problem in judge(name, 0)]
    assert not found, told(found)


# What was wrong once: kernels whose order torch does not know without data, or without the device.
OF_IMAGES = [
    "nn.functional.conv2d",
    "nn.functional.conv_transpose2d",
    "nn.functional.batch_norm",
    "nn.functional.group_norm",
    "nn.functional.pixel_shuffle",
    "nn.functional.channel_shuffle",
    "nn.functional.pad.reflect",
    "nn.functional.max_unpool2d",
    "nn.functional.adaptive_avg_pool2d",
    "nn.functional.scaled_dot_product_attention",
    "roll",
    "fft.fft",
    "minimum",
    "unravel_index",
]


@pytest.mark.parametrize("name", OF_IMAGES)
def test_results_of_ops_that_keep_formats(name):
    found = judge(name, 0, most=1)
    assert not found, told(found)


def _network(memory_format):
    torch.manual_seed(3)
    layers = nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.SiLU(),
        nn.Dropout(0.5),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.BatchNorm2d(8),
        nn.ReflectionPad2d(1),
        nn.Dropout(0.5),
        nn.Conv2d(8, 16, 1),
        nn.PixelShuffle(2),
        nn.Dropout(0.5),
        nn.AdaptiveAvgPool2d(3),
        nn.Dropout(0.5),
    )
    return layers.to(memory_format=memory_format)


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_an_expanded_image_has_no_named_format(format):
    image, places = torch.randn(1, 2, 3, 4), torch.zeros(2, 2, 3, 4, dtype=torch.long)
    image = image.contiguous(memory_format=format)

    def run(x, i):
        return F.max_unpool2d(x.expand(2, 2, 3, 4), i, 2)

    def program(rank, world_size):
        lay = partial(vd.distribute_tensor, device_mesh=device_mesh((2,)), src_data_rank=None)
        found = run(lay(image, placements=[Shard(1)]), lay(places, placements=[Replicate()]))
        assert not lying(found, run(image, places))

    simulate(2)(program)


@pytest.mark.parametrize("wrap", [lambda f: f, vd.capture], ids=["eager", "captured"])
def test_expanded_operands_are_so_where_they_are_gathered(wrap):
    """What has no rule lays its result out as on one device; each element has its own gradient."""
    values, weights = torch.randn(1, 6, 8), torch.arange(5.0).view(5, 1, 1)

    def transformed(x):
        return torch.fft.fft(x, norm="ortho")

    def step(x, call):
        found = call(x)
        (found.abs().square() * weights).sum().backward()
        return found, x.grad

    def program(rank, world_size):
        call = wrap(transformed)
        for _ in range(3):
            one = values.expand(5, 6, 8).requires_grad_()
            laid = vd.distribute_tensor(values, device_mesh((2,)), [Shard(2)], src_data_rank=None)
            ours = step(laid.expand(5, 6, 8).requires_grad_(), call)
            for mine, expected in zip(ours, step(one, transformed), strict=True):
                assert mine.stride() == expected.stride()
                torch.testing.assert_close(mine.full_tensor(), expected)

    simulate(2)(program)


@pytest.mark.parametrize("sharded", [0, None])
@pytest.mark.parametrize("lies", ["images", "weights", "both"])
def test_dropout_behind_images_draws_the_masks_of_one_device(lies, sharded):
    last, usual = torch.channels_last, torch.contiguous_format
    x = torch.randn(8, 4, 6, 6).to(memory_format=last if lies != "weights" else usual)
    wanted = _network(last if lies != "images" else usual)
    torch.manual_seed(9)
    expected = wanted(x)

    def program(mesh):
        model = _network(last if lies != "images" else usual)
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                laid = vd.distribute_tensor(parameter, mesh, [Replicate()])
                setattr(module, name, nn.Parameter(laid))
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, vd.distribute_tensor(buffer, mesh, [Replicate()]))
        cut = [Replicate()] if sharded is None else [Shard(sharded)]
        images = vd.distribute_tensor(x, mesh, cut)
        torch.manual_seed(9)
        result = model(images)
        torch.testing.assert_close(result.full_tensor(), expected)
        assert not lying(result, expected)
        # The same again, by compiled calls.
        torch.manual_seed(9)
        torch.testing.assert_close(model(images).full_tensor() != 0, expected != 0)

    on_mesh((4,), program)


def test_the_order_is_asked_once_for_a_kind_of_call(monkeypatch):
    """Later calls follow a plan, or a compiled call, that knows it."""
    asked = []
    known = memory_order._trial_results
    monkeypatch.setattr(
        memory_order, "_trial_results", lambda *args: asked.append(args) or known(*args)
    )

    def program(mesh):
        x = torch.randn(4, 8, 6, 6).to(memory_format=torch.channels_last)
        y = vd.distribute_tensor(x, mesh, [Shard(0)])
        w = vd.distribute_tensor(torch.randn(8, 8, 3, 3), mesh, [Replicate()])
        counts = []
        for _ in range(4):
            F.relu(F.conv2d(y, w))
            counts.append(len(asked))
        return counts

    (counts,) = on_mesh((1,), program)
    assert counts[0] == 2
    assert counts[-1] == counts[0]
