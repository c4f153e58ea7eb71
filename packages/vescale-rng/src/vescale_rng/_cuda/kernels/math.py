"""The functions whose bits depend on the device, each as ATen's CUDA code has it.

Compiled, they are those of NVIDIA's libdevice that nvcc uses where ATen says `__logf`, `logf`,
`__sincosf`, and so on. The interpreter has no libdevice: there numpy's functions stand in, which
agree to a few units in the last place, and everything around them is tested as it is.
"""
# mypy: ignore-errors

import triton
import triton.language as tl
from triton.language.extra import libdevice

INTERPRETED = triton.knobs.runtime.interpret

if INTERPRETED:

    @triton.jit
    def fma(x, y, z):
        # The interpreter rounds twice. In fp64 the product is exact, so for fp32 this does not,
        # but for one case in 2**29.
        return (x.to(tl.float64) * y.to(tl.float64) + z.to(tl.float64)).to(z.dtype)

    @triton.jit
    def log(x):
        return tl.log(x)

    @triton.jit
    def exp(x):
        return tl.exp(x)

    @triton.jit
    def tan(x):
        return tl.sin(x) / tl.cos(x)

    @triton.jit
    def sinpi(x):
        return tl.sin(x * 3.141592653589793)

    @triton.jit
    def cospi(x):
        return tl.cos(x * 3.141592653589793)

    @triton.jit
    def ceil(x):
        return tl.ceil(x)

    @triton.jit
    def sqrt(x):
        return tl.sqrt(x)

    @triton.jit
    def divide(x, y):
        return x / y

    fast_log, fast_exp, fast_tan = log, exp, tan

    @triton.jit
    def fast_sin(x):
        return tl.sin(x)

    @triton.jit
    def fast_cos(x):
        return tl.cos(x)

    @triton.jit
    def converted(x, out: tl.constexpr):
        # The interpreter truncates where a device rounds to nearest even.
        if out == tl.bfloat16:
            bits = x.to(tl.float32).to(tl.int32, bitcast=True)
            bits += 0x7FFF + ((bits >> 16) & 1)
            return (bits & -65536).to(tl.float32, bitcast=True).to(out)
        else:
            return x.to(out)

else:
    fma = tl.fma
    log, exp, tan = libdevice.log, libdevice.exp, libdevice.tan
    sinpi, cospi = libdevice.sinpi, libdevice.cospi
    ceil, sqrt, divide = libdevice.ceil, libdevice.sqrt_rn, libdevice.div_rn
    fast_log, fast_exp, fast_tan = libdevice.fast_logf, libdevice.fast_expf, libdevice.fast_tanf
    fast_sin, fast_cos = libdevice.fast_sinf, libdevice.fast_cosf

    @triton.jit
    def converted(x, out: tl.constexpr):
        return x.to(out)
