"""Property: the Triton kernel writes the bytes that numpy does, and is compiled without fusion."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from portable_cases import EVERY, KEY, as_signed, same
from rng_cases import cases, draws
from rng_pieces import strided
from vescale_rng import (
    Bernoulli,
    Exponential,
    Normal,
    RandInt,
    ShardLayout,
    Uniform,
    _portable,
    fill_,
    use,
    whole,
)
from vescale_rng._portable.maps import map_of

triton = pytest.importorskip("triton")

INTERPRETED = triton.knobs.runtime.interpret
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
runs_kernels = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(),
    reason="no GPU, and the kernels are not interpreted: set TRITON_INTERPRET=1",
)


def by_kernel(distribution, dtype, layout: ShardLayout, local: torch.Tensor) -> torch.Tensor:
    from vescale_rng._portable import launch as _launch

    kind = map_of(distribution, dtype)
    there = local.to(DEVICE)
    _launch.launch_fill(there, kind, kind.fused, layout, as_signed(KEY).to(DEVICE))
    return there.cpu()


@pytest.mark.kernels
@runs_kernels
@pytest.mark.parametrize(("distribution", "dtype"), EVERY)
def test_the_kernel_writes_what_numpy_does(distribution, dtype):
    if map_of(distribution, dtype).fused is None:
        # Not the kernel's: `fill` goes by torch.
        assert dtype == torch.float64 or not isinstance(distribution, Uniform | Normal)
        return
    layout = whole((3001,))
    expected = torch.empty(3001, dtype=dtype)
    _portable.fill_portable(expected, distribution, layout, KEY)
    assert same(by_kernel(distribution, dtype, layout, torch.empty_like(expected)), expected)


@pytest.mark.kernels
@runs_kernels
@given(cases(most=600), draws(), st.integers(0, 2**34))
@settings(max_examples=40)
def test_boxes_of_every_kind(case, draw, place):
    distribution, dtype = draw
    if map_of(distribution, dtype).fused is None:
        return
    for coordinate in list(case.coordinates())[:4]:
        layout = case.layout(coordinate)
        expected = strided(layout.local_shape, case.order, dtype)
        found = strided(layout.local_shape, case.order, dtype)
        _portable.fill_portable(expected, distribution, layout, KEY)
        assert same(by_kernel(distribution, dtype, layout, found), expected)


KINDS = [
    (Normal(), torch.float32, "*fp32"),
    (Normal(), torch.bfloat16, "*bf16"),
    (Uniform(-1.0, 2.0), torch.float16, "*fp16"),
    (Exponential(2.0), torch.float32, "*fp32"),
    (Bernoulli(0.3), torch.bool, "*u8"),
    (RandInt(-3, 9), torch.int64, "*i64"),
]


@pytest.mark.kernels  # on a GPU: the interpreter makes no code
@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel is not compiled")
@pytest.mark.parametrize(("distribution", "dtype", "pointer"), KINDS)
def test_no_product_is_fused_with_a_sum(distribution, dtype, pointer):
    # Compiled for a GPU, which takes none.
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from vescale_rng._portable.launch import OPTIONS
    from vescale_rng._portable.triton_kernel import fill_tile

    kind = map_of(distribution, dtype)
    numbers = "fp32" if isinstance(kind.fused.a, float) else "i32"
    signature = dict.fromkeys(fill_tile.arg_names, "i32") | {"out": pointer, "key": "*i64"}
    signature |= {"a": numbers, "b": numbers, "high": "fp32", "low": "fp32"}
    constants = {"KIND": kind.fused.kind, "EXCLUDED": kind.excluded is not None, "LANES": 256}
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=fill_tile, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=OPTIONS)
    code = compiled.asm["ptx"]
    assert not re.search(r"\bfma\.", code)
    # Without `.rn` the assembler may fuse; `.approx` and `.ftz` are not correctly rounded.
    floats = re.findall(r"\b(?:add|sub|mul|div|sqrt)[.\w]*\.f32\b", code)
    assert all(re.fullmatch(r"\w+\.rn\.f32", name) for name in floats)
    assert bool(floats) == (numbers == "fp32")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("distribution", "dtype"), EVERY)
def test_a_gpu_without_kernels_draws_what_a_cpu_does(distribution, dtype):
    from vescale_rng._portable.fill_boxes import fill_by_arrays

    layout = whole((40_001,))
    local = torch.empty(40_001, dtype=dtype, device="cuda")
    fill_by_arrays(local, map_of(distribution, dtype), layout, as_signed(KEY).cuda())
    expected = torch.empty(40_001, dtype=dtype)
    _portable.fill_portable(expected, distribution, layout, KEY)
    assert same(local.cpu(), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_generator_on_the_device_makes_the_key_there():
    with use("portable"):
        generator = torch.Generator("cuda").manual_seed(2)
        drawn = torch.empty(1, dtype=torch.int64, device="cuda")
        drawn.random_(-(1 << 63), None, generator=torch.Generator("cuda").manual_seed(2))
        local = fill_(torch.empty(99, device="cuda"), Normal(), whole((99,)), generator)
        assert generator.get_offset() == 4
    expected = torch.empty(99)
    _portable.fill_portable(expected, Normal(), whole((99,)), int(drawn) % (1 << 64))
    assert same(local.cpu(), expected)
