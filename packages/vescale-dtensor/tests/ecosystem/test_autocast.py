"""Under autocast an op gives the dtype, the values and the gradients that one device gives.

Ops of torch's lists and of none, wherever their operands lie, over caches that were filled with
autocast off and on. Also in half precision without autocast, where rules that compose an op must
round as rarely as torch's own kernel.
"""

import logging
import random
import threading
import warnings
import zlib
from contextlib import nullcontext

import one_device
import pytest
import torch
import torch.nn.functional as F
import vescale_dtensor as vd
from autocast_cases import CASES, numbers
from named_cases import named_cases
from torch.amp import custom_bwd, custom_fwd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from vescale_comm import simulate
from vescale_comm.testing import device_mesh, run
from vescale_dtensor import Partial, Replicate, Shard

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# On each mesh the dtypes of autocast, and of the operands.
MESHES = {
    (4,): [(BF16, FP32), (BF16, BF16), (None, FP16)],
    (2, 2): [(BF16, FP32), (FP16, FP32), (None, BF16)],
}
MODES = {mode for modes in MESHES.values() for mode in modes}
# Terms are rounded before they are summed over up to four ranks, here and in backward; as a share
# of the largest element. On one device all but the last of these roundings are missing. Where that
# rounds several times in a row (attention of several heads), twice its own error is allowed, too.
ROUNDINGS = 4


def amp(dtype):
    return torch.autocast("cpu", dtype=dtype, enabled=dtype is not None)


def full_tensor(x):
    return (x.full_tensor() if isinstance(x, vd.DTensor) else x).detach()


def own_dtype(x):
    """The dtype of the data, and what C++ knows of a wrapper."""
    if not isinstance(x, vd.DTensor):
        return x.dtype, x.dtype
    with torch._C.DisableTorchFunctionSubclass():
        return x._local_tensor.dtype, torch._C.TensorBase.dtype.__get__(x)


class Somewhere:
    """Lays operands out at random: cut along a dim, replicated, or as terms of a sum."""

    def __init__(self, sizes, seed):
        self.mesh, self.random = vd.init_device_mesh("cpu", sizes), random.Random(seed)

    def __call__(self, tensor):
        kinds = [Replicate(), Partial(), *map(Shard, range(tensor.ndim))]
        placements = self.random.choices(kinds, k=self.mesh.ndim)
        return vd.distribute_tensor(tensor, self.mesh, placements, src_data_rank=None)


def found_of(case, mode, place):
    """Dtypes, result and gradients of a case; or the error that torch raises."""
    function, operands = case
    dtype, own = mode
    leaves = [place(t.to(own)).requires_grad_() for t in operands]
    torch.manual_seed(3)
    with amp(dtype):
        result = function(*leaves)
    if result.requires_grad:
        shape = tuple(result.shape)
        weights = torch.linspace(-1, 1, max(1, result.numel())).reshape(shape)
        result.backward(weights.to(result.dtype))
    gradients = [None if leaf.grad is None else full_tensor(leaf.grad) for leaf in leaves]
    return (result.dtype, *own_dtype(result)), full_tensor(result), gradients


def errors_of(wanted, exact):
    """By how much one device's own result and gradients are off."""
    pairs = zip([wanted[1], *wanted[2]], [exact[1], *exact[2]], strict=True)
    return [0.0 if one is None else distance(one, best) for one, best in pairs]


def distance(a, b):
    kind = torch.complex128 if b.is_complex() else torch.float64
    return (a.to(kind) - b.to(kind)).abs().nan_to_num(0.0, 0.0).max().item() if b.numel() else 0.0


def wrong(found, wanted, errors, eps):
    """What is wrong with a result, in words."""
    if found[0] != wanted[0]:
        return f"dtypes {found[0]}, not {wanted[0]}"
    pairs = zip([found[1], *found[2]], [wanted[1], *wanted[2]], strict=True)
    for i, (mine, one) in enumerate(pairs):
        if one is None or mine is None:
            if mine is not one:
                return f"{i}: {mine} is not {one}"
            continue
        if mine.dtype != one.dtype or mine.shape != one.shape:
            return f"{i}: {mine.dtype} {mine.shape}, not {one.dtype} {one.shape}"
        limit = ROUNDINGS * eps * one.abs().nan_to_num(0.0, 0.0).max().item() + 2 * errors[i]
        if distance(mine, one) > limit or not torch.equal(one.isfinite(), mine.isfinite()):
            return f"{i}: {mine} is not {one}"
    return None


def on_a_rank(rank, world, cases, sizes, wanted):
    problems = []
    for name, case in cases.items():
        for mode in MESHES[sizes]:
            if isinstance(wanted[name, mode], Exception):
                continue
            one, errors = wanted[name, mode]
            place = Somewhere(sizes, zlib.crc32(f"{name}{mode}{sizes}".encode()))
            found = found_of(case, mode, place)
            eps = 2.0**-8 if BF16 in mode else 2.0**-11
            problem = wrong(found, one, errors, eps)
            if problem:
                problems.append(f"{name} in {mode}: {problem}")
    return problems


def attempted(case, mode):
    """What one device finds, and how far that is from what it finds in double precision."""
    try:
        found = found_of(case, mode, torch.clone)
        return found, errors_of(found, found_of(case, (None, torch.float64), torch.clone))
    except (RuntimeError, NotImplementedError) as problem:  # torch has no such kernel
        return problem


@pytest.fixture(autouse=True)
def quiet():
    """Notes of the fallback, and torch's deprecations, are no part of what is compared."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(action="ignore"):
        yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("kind", CASES)
def test_ops_of_the_lists(kind):
    cases = CASES[kind]
    wanted = {(n, mode): attempted(case, mode) for n, case in cases.items() for mode in MODES}
    ran = {n for (n, mode), result in wanted.items() if not isinstance(result, Exception)}
    assert ran == set(cases)
    for sizes in MESHES:
        for found in simulate(4)(on_a_rank, cases, sizes, wanted):
            assert not found, "\n".join(found)


# One for each way in which a call that is known is answered.
FORMS = {
    "two": (torch.matmul, (numbers(4, 4), numbers(4, 4))),
    "one": (lambda a: torch.matmul(a, a).trace(), (numbers(4, 4),)),
    "method": (lambda a: (a @ a).prod(), (numbers(4, 4),)),
    "three": (F.linear, (numbers(4, 4), numbers(4, 4), numbers(4))),
    "None": (lambda x, w: F.linear(x, w, None), (numbers(4, 4), numbers(4, 4))),
    "list": (lambda a, b: torch.cat([a @ b, a]), (numbers(4, 4), numbers(4, 4))),
    "many": (lambda a: torch.split(a @ a, 2)[1], (numbers(4, 4),)),
    "named": (lambda a, b: torch.addmm(a, mat1=a, mat2=b), (numbers(4, 4), numbers(4, 4))),
    "plain": (lambda a: a @ numbers(4, 4), (numbers(4, 4),)),
    "chain": (lambda a, b: (a @ b).softmax(-1).sum(0), (numbers(4, 4), numbers(4, 4))),
    "einsum": (lambda a, b: torch.einsum("ik,kj->ij", a, b), (numbers(4, 4), numbers(4, 4))),
}
WATCHED = {"grad": nullcontext, "no grad": torch.no_grad, "inference": torch.inference_mode}
SEQUENCE = [None, BF16, None, FP16, BF16, "nested", BF16, None]


def toggled(function, operands, wants):
    """The dtypes that come out while autocast goes on and off."""
    seen = []
    for dtype in SEQUENCE:
        if dtype == "nested":
            with amp(BF16):
                seen.append(function(*operands))
                with amp(None):
                    seen.append(function(*operands))
                # torch keeps casts of leaves while it is on, whatever dtype is asked for then.
                with amp(BF16 if wants else FP16):
                    seen.append(function(*operands))
                seen.append(function(*operands))
            continue
        with amp(dtype):
            seen.append(function(*operands))
    return [(r.dtype, *own_dtype(r)) for r in seen]


def toggled_on_a_rank(rank, world, name, wanted):
    problems = []
    for layout in ([Shard(0)], [Shard(1)], [Replicate()], [Partial()]):
        mesh = vd.init_device_mesh("cpu", (4,))
        function, tensors = FORMS[name]
        for watched, mode in WATCHED.items():
            for wants in (True, False):
                operands = [
                    vd.distribute_tensor(
                        t, mesh, layout if t.ndim > 1 else [Replicate()], src_data_rank=None
                    ).requires_grad_(wants)
                    for t in tensors
                ]
                with mode():
                    found = toggled(function, operands, wants)
                if found != wanted[wants]:
                    problems.append((layout, watched, wants, found))
    return problems


@pytest.mark.parametrize("name", FORMS)
def test_no_dtype_is_stale(name):
    function, tensors = FORMS[name]
    wanted = [toggled(function, tensors, wants) for wants in (False, True)]
    assert len({dtypes[0] for dtypes in wanted[0]}) > 1 or name in ("one", "method", "list")
    for problems in simulate(4)(toggled_on_a_rank, name, wanted):
        assert not problems, problems[0]


PROGRAMS, program = named_cases()


X, UP, DOWN = numbers(7, 6), numbers(9, 6), numbers(5, 9)


class Place(one_device.Place):
    """One device, or dp=2 x tp=2: the batch on dp, parameters on tp."""

    def __call__(self, tensor, tp=None, dp=None, grad=False):
        return super().__call__(tensor, dp or Replicate(), tp or Replicate(), grad)


def operands(place):
    return (
        place(X, dp=Shard(0), grad=True),
        place(UP, Shard(0), grad=True),
        place(DOWN, Shard(1), grad=True),
    )


def layers(x, up, down):
    return F.linear(F.gelu(F.linear(x, up)), down)


@program
def nested_and_as_a_decorator(place):
    x, up, down = operands(place)

    @torch.autocast("cpu", dtype=BF16)
    def outer():
        hidden = F.linear(x, up)
        with torch.autocast("cpu", enabled=False):
            whole_precision = F.linear(hidden.float(), up @ up.T)
        return hidden, whole_precision, F.linear(hidden, down)

    results = outer()
    sum(r.float().square().mean() for r in results).backward()
    return [*results, x.grad, up.grad, down.grad]


@program
def backward_under_autocast(place):
    x, up, down = operands(place)
    with amp(BF16):
        loss = layers(x, up, down).float().square().mean()
        loss.backward()
    return loss, x.grad, up.grad, down.grad


@program
def checkpoints(place):
    found = []
    for reentrant in (False, True) if place.mesh is None else (False, False):
        x, up, down = operands(place)
        with amp(BF16):
            result = checkpoint(layers, x, up, down, use_reentrant=reentrant)
        result.float().square().mean().backward()
        found += [result, x.grad, up.grad, down.grad]
    return found


class Cube(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=FP32)
    def forward(ctx, x):
        ctx.save_for_backward(x)
        assert not torch.is_autocast_enabled("cpu")
        return x * x * x

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx, cotangent):
        (x,) = ctx.saved_tensors
        return cotangent * x * x * 3


class Scaled(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx, cotangent):
        x, weight = ctx.saved_tensors
        assert torch.is_autocast_enabled("cpu")
        return cotangent @ weight.mT, x.mT @ cotangent


@program
def functions_of_ones_own(place):
    x, up, _ = operands(place)
    with amp(BF16):
        hidden = F.linear(x, up)
        result = Cube.apply(hidden)
        other = Scaled.apply(x, up.mT)
    (result.sum() + other.float().sum()).backward()
    return result, other, x.grad, up.grad


@program
def defaults_of_torch(place):
    x = place(torch.arange(6).reshape(3, 2), dp=Shard(0))
    found = [x / 2, x.float().mean()]
    try:
        torch.set_default_dtype(torch.float64)
        found += [x / 2, x * 1.5, torch.sqrt(x)]
    finally:
        torch.set_default_dtype(FP32)
    torch.set_autocast_dtype("cpu", FP16)
    try:
        with torch.autocast("cpu"):
            assert torch.get_autocast_dtype("cpu") is FP16
            found.append(place(X, dp=Shard(0)) @ place(UP.T, Shard(1)))
    finally:
        torch.set_autocast_dtype("cpu", BF16)
    return [*found, x / 2]


@program
def results_into_given_tensors(place):
    x, other = place(X, dp=Shard(0)), place(UP.T.contiguous(), Shard(1))
    out, low = place(torch.zeros(7, 9), dp=Shard(0)), place(torch.zeros(7, 9).to(BF16))
    with amp(BF16):
        torch.mm(x, other, out=out)
        found = x @ other
        low += found
        out.add_(found)
    return out, low, found


@program
def other_threads(place):
    x, other = place(X, dp=Shard(0)), place(UP.T.contiguous(), Shard(1))
    found = []
    with amp(BF16):
        found.append(x @ other)
        if place.mesh is None:
            thread = threading.Thread(target=lambda: found.append(x @ other))
            thread.start()
            thread.join()
        else:
            with amp(None):  # ranks are threads that run one at a time
                found.append(x @ other)
        found.append(x @ other)
    return found


@program
def mixed_models(place):
    """Norms in float32 and layers in bf16, as autocast and as by hand."""
    x, up, down = operands(place)
    scale = place(torch.ones(9), Shard(0), grad=True)
    with amp(BF16):
        hidden = F.layer_norm(F.linear(x, up), (9,), scale)
        attended = (hidden @ hidden.mT).softmax(-1) @ hidden
        loss = F.cross_entropy(F.linear(attended, down), torch.tensor([1, 0, 3, 2, 1, 4, 0]))
    loss.backward()
    return loss, x.grad, up.grad, down.grad, scale.grad


def ran(function, place):
    torch.manual_seed(0)
    return [(r.dtype, *own_dtype(r), full_tensor(r)) for r in function(place)]


def program_on_a_rank(rank, world, name):
    mesh = vd.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return ran(PROGRAMS[name], Place(mesh))


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name):
    wanted = ran(PROGRAMS[name], Place())
    for results in simulate(4)(program_on_a_rank, name):
        for found, one in zip(results, wanted, strict=True):
            assert found[:3] == one[:3]
            # Every one of these rounds a few times in a row.
            limit = 3 * ROUNDINGS * 2.0**-8 * one[3].abs().max().item()
            assert (found[3].double() - one[3].double()).abs().max() <= limit, (found[3], one[3])


class Casts(TorchDispatchMode):
    """Counts the casts of tensors of a shape."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and tuple(args[0].shape) == self.shape:
            self.count += 1
        return func(*args, **(kwargs or {}))


def casts(place, shape):
    x, up = place(X, dp=Shard(0)), place(numbers(11, 6), Shard(0), grad=True)
    with Casts(shape) as casting, amp(BF16):
        loss = sum(F.linear(x, up).float().square().mean() for _ in range(3))
    loss.backward()
    return casting.count, full_tensor(up.grad)


def casts_on_a_rank(rank, world):
    return casts(Place(device_mesh((2, 2), ("dp", "tp"))), (6 - rank % 2, 6))


def test_a_weight_is_cast_once():
    count, gradient = casts(Place(), (11, 6))
    assert count == 1
    for found, mine in run(casts_on_a_rank, 4):
        assert found == 1
        torch.testing.assert_close(mine, gradient, rtol=0, atol=2.0**-6)


def counted(rank, world, dtype):
    """A mean over more targets, or a norm of larger numbers, than half floats can say."""
    mesh = vd.init_device_mesh("cpu", (4,))
    rows = 3001
    target = torch.arange(rows) % 3
    logits = numbers(rows, 5).to(dtype)
    placed = vd.distribute_tensor(logits, mesh, [Shard(0)], src_data_rank=None)
    found = [F.cross_entropy(placed, target), F.mse_loss(placed * 50, placed * 0)]
    found += [(placed * 50).square().mean(), (placed * 8).norm()]
    return [full_tensor(x) for x in found]


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_half_floats_are_counted_and_summed_in_single(dtype):
    logits, eps = numbers(3001, 5).to(dtype), 2.0**-8 if dtype is BF16 else 2.0**-11
    wide = logits.double()
    wanted = [F.cross_entropy(wide, torch.arange(3001) % 3), (wide * 50).square().mean()]
    wanted += [(wide * 50).square().mean(), (wide * 8).norm()]
    for found in simulate(4)(counted, dtype):
        for mine, one in zip(found, wanted, strict=True):
            assert mine.dtype is dtype
            assert abs(mine.item() - one.item()) <= ROUNDINGS * eps * one.item()
