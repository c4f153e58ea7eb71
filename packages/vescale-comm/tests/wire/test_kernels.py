"""The Triton kernels have the bits of the torch path, on the CPU (interpreted) and on a GPU."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from vescale_comm._wire import formats
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
    if where == "cuda" and not formats.has_kernels(wire, torch.device(where)):
        pytest.skip("there is no kernel for it")
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


@pytest.mark.kernels
def test_launches_are_on_the_device_of_the_tensors(monkeypatch):
    from vescale_comm._wire import kernels

    current, launched = ["cuda:0"], []

    @contextmanager
    def entered(device):
        current.append(str(device))
        yield
        current.pop()

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **constants: launched.append((grid, current[-1]))

    monkeypatch.setattr(torch.cuda, "device", entered)
    x = SimpleNamespace(device=torch.device("cuda", 1))
    kernels._launch(Kernel(), x, 1000)
    assert launched == [((4,), "cuda:1")]
    assert current == ["cuda:0"]


def test_below_ada_fp8_goes_by_torch(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    device = torch.device("cuda", 0)
    assert not formats.has_kernels("fp8", device)
    assert formats.has_kernels("int8", device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert formats.has_kernels("fp8", device)


# In a process of its own: the interpreter, once asked for, replaces every kernel.
COMPILED = """
import json
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from vescale_comm._wire import kernels
answers = []
for kernel, constants in (
    (kernels._quantise, {"LARGEST": 127.0, "WHOLE": True, "B": 256}),
    (kernels._fold, {"MEMBERS": 3, "B": 256}),
):
    kinds = {"values": "*i8", "numel": "i32"}
    signature = {
        name: "constexpr" if name in constants else kinds.get(name, "*fp32")
        for name in kernel.arg_names
    }
    made = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 80, 32))
    answers.append(made.asm["ttir"])
print(json.dumps(answers))
"""


@pytest.mark.kernels
def test_elements_are_counted_in_64_bits():
    # Of two thousand million of them a test has no memory: what is compiled says it.
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    found = subprocess.run(
        [sys.executable, "-c", COMPILED], env=env, check=True, capture_output=True, text=True
    )
    for text in json.loads(found.stdout):
        lines = text.splitlines()
        masks = [line for line in lines if "arith.cmpi slt" in line and "256x" in line]
        assert masks
        assert all("256xi64" in line for line in masks)
        places = [line for line in lines if "tt.addptr" in line and "tensor<256x" in line]
        # The first address of a block; a member's row is the one before and the number of elements.
        assert any("256xi64" in line for line in places)
        # Nothing is multiplied in 32 bits.
        products = [line for line in lines if "arith.muli" in line]
        assert products
        assert all("i64" in line for line in products)
