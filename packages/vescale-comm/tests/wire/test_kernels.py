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
from vescale_comm_kernels import folded, not_finite, quantised

pytest.importorskip("triton", reason="triton is not installed")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def device():
    if torch.cuda.is_available() and not INTERPRETED:
        return "cuda"
    if INTERPRETED:
        return "cpu"
    pytest.skip("needs TRITON_INTERPRET=1, or a GPU")


def same(pairs):
    """All pairs have the same bits, and there are some; a NaN is a NaN."""
    compared = 0
    for name, expected, found in pairs:
        if expected.is_floating_point():
            nan = expected.isnan()
            assert torch.equal(found.isnan(), nan), name
            expected, found = (x.masked_fill(nan, 0).view(torch.int32) for x in (expected, found))
        assert torch.equal(expected, found), name
        compared += 1
    assert compared


@pytest.mark.kernels
@pytest.mark.gpu
@pytest.mark.parametrize("wire", ["int8", "fp8"])
def test_quantise_has_the_bits_of_torch(wire):
    where = device()
    if wire == "fp8" and where == "cpu":
        pytest.skip("the interpreter rounds to fp8 in numpy, which has no such dtype")
    if where == "cuda" and not formats.has_kernels(wire, torch.device(where)):
        pytest.skip("there is no kernel for it")
    same(quantised(wire, where))


@pytest.mark.kernels
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, in the interpreter
def test_a_block_that_is_not_finite_has_no_finite_scale():
    same(not_finite(device()))


@pytest.mark.kernels
@pytest.mark.gpu
def test_fold_has_the_bits_of_torch():
    same(folded(device()))


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


@pytest.mark.kernels
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
