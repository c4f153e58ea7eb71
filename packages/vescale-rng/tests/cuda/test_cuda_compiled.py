"""Property: compiled for a GPU, the kernel has the instructions that nvcc makes of ATen's code.

Needs triton and no GPU: it compiles to PTX in a process of its own, as the interpreter, once asked
for, replaces every kernel. The counts are those of nvcc's PTX for `curand_uniform4`,
`curand_normal4` and the lambdas of DistributionTemplates.h, for each element: one contraction
more or less would change the last bit of some number.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
]

SCRIPT = """
import json, re, sys, collections
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from vescale_rng._cuda.kernels.fill import OPTIONS, fill_span

def compiled(kind, out, double, arch):
    constants = dict(KIND=kind, MAP="grid", THREADS=270336, UNROLL=2 if double else 4,
                     DOUBLE=double, WIDE=False, FROM_MEMORY=False, BLOCK=1024)
    kinds = {"local": "*" + out, "given": "*fp32", "seed_memory": "*i64", "offset_memory": "*i64"}
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32")
                 for name in fill_span.arg_names}
    options = {**OPTIONS, "num_warps": 4}
    source = ASTSource(fill_span, signature, constants)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options).asm["ptx"]

answers = []
for kind, out, double, arch in json.loads(sys.argv[1]):
    ptx = compiled(kind, out, double, arch)
    found = re.findall(r"^\\s+(?:@!?%p\\d+ )?([a-z0-9]+\\.[a-z0-9.]+)", ptx, re.M)
    answers.append(collections.Counter(found))
print(json.dumps(answers))
"""
# Of each instruction, how many for each of the eight elements of a thread.
CASES = [
    ("uniform", "fp32", False, 90, {"fma.rn.f32": 2, "cvt.rn.f32.u32": 1}),
    (
        "normal",
        "fp32",
        False,
        90,
        {"fma.rn.f32": 15, "sqrt.rn.f32": 1, "sin.approx.f32": 1, "cos.approx.f32": 1},
    ),
    ("log_normal", "fp32", False, 80, {"ex2.approx.f32": 1, "fma.rn.f32": 15}),
    ("exponential", "fp32", False, 90, {"lg2.approx.f32": 1, "fma.rn.f32": 1}),
    ("geometric", "fp32", False, 90, {"lg2.approx.f32": 9 / 8, "div.rn.f32": 1}),
    (
        "cauchy",
        "fp32",
        False,
        90,
        {"sin.approx.f32": 1, "cos.approx.f32": 1, "div.approx.f32": 1, "fma.rn.f32": 2},
    ),
    ("normal", "bf16", False, 90, {"cvt.rn.bf16.f32": 1, "fma.rn.f32": 15}),
    ("uniform", "fp64", True, 90, {"fma.rn.f64": 2, "cvt.rn.f64.u64": 1}),
    ("normal", "fp64", True, 90, {"fma.rn.f64": 42, "sqrt.rn.f64": 1, "rcp.approx.ftz.f64": 1}),
    ("cauchy", "fp64", True, 90, {"fma.rn.f64": 27}),
    ("log_normal", "fp64", True, 90, {"fma.rn.f64": 56}),
    ("exponential", "fp64", True, 80, {"fma.rn.f64": 18, "rcp.approx.ftz.f64": 1}),
]


@pytest.fixture(scope="module")
def counted():
    """The instructions of every case, from one process."""
    asked = json.dumps([case[:4] for case in CASES])
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", SCRIPT.replace("\\\\", "\\"), asked]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("index", range(len(CASES)), ids=["-".join(c[:2]) for c in CASES])
def test_the_arithmetic_is_the_same(counted, index):
    found = counted[index]
    for instruction, each in CASES[index][4].items():
        assert found.get(instruction, 0) == 8 * each
    # Nothing flushes a small number to zero, but the first guess of a reciprocal.
    flushing = [name for name in found if ".ftz" in name]
    assert [name for name in flushing if name != "rcp.approx.ftz.f64"] == []
