"""No door lets this rank's data out as if it were global: each is closed, or gives the whole.

A closed door raises on every rank; an open one gives what one device gives. All run on four
processes, mesh dp=2 x tp=2. The doors of raw communication are in `test_doors_communication`.
"""

import inspect
import io
import pickle  # noqa: TID251 (refused, that is the test)
import tempfile
import warnings

import numpy as np
import pytest
import torch
import vescale_dtensor as vd
from one_device import Place, check
from torch import nested, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor import parallel
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DistributedDataParallel
from vescale_comm.testing import device_mesh, on_ranks
from vescale_dtensor import DTensorError, Replicate, Shard

WHOLE, AT = torch.arange(24.0).reshape(6, 4), torch.tensor([0, 1])


def module_with(x):
    module = nn.Linear(4, 6)
    module.weight = nn.Parameter(x)
    return module


def known(function, x):
    """A function whose calls were made before."""
    function(x), function(x)
    return function


def written(x, name, value):
    setattr(x, name, value)


def saved(value, **options):
    torch.save(value, io.BytesIO(), **options)


def without_overrides(function):
    with torch._C.DisableTorchFunctionSubclass():
        return function()


def optimizer_state(x):
    optimizer = torch.optim.AdamW(module_with(x).parameters())
    optimizer.param_groups[0]["params"][0].grad = x
    optimizer.step()
    return optimizer.state_dict()


def node_of(x):
    return (x.requires_grad_() * 2).grad_fn


def hooked_together(x):
    """It asks the engine about nodes, and those of a DTensor are not handed out."""
    torch.autograd.graph.register_multi_grad_hook((x, x * 2), print)
    (x * 2).sum().backward()


LEGACY = {"_use_new_zipfile_serialization": False}
# What each must say besides being an error of ours; None: torch raises first, in its own words.
OURS = ""
IN_ITS_OWN_WORDS = (RuntimeError, TypeError, ValueError, AttributeError)
# FSDP2 writes an attribute on each parameter first, where we can tell what to do. Torch 2.11's does
# not, and is told that the ranks read other rows each.
FSDP2 = "to_torch" if "_fsdp_orig_uid" in inspect.getsource(_fsdp_param) else None
CLOSED = {
    # Memory and pickles.
    "data_ptr": (lambda x: x.data_ptr() + 4, "to_local"),
    "const_data_ptr": (lambda x: int(x.const_data_ptr()), "to_local"),
    "storage_offset": (lambda x: x[2:].storage_offset(), "to_local"),
    "untyped_storage": (lambda x: x.untyped_storage(), "to_local"),
    "storage": (lambda x: x.storage(), "to_local"),
    "typed storage": (lambda x: x._typed_storage(), "to_local"),
    "share_memory_": (lambda x: x.share_memory_(), "to_local"),
    "share_memory of a module": (lambda x: module_with(x).share_memory(), "to_local"),
    "reductions": (torch.multiprocessing.reductions.reduce_tensor, "to_local"),
    "__dlpack__": (lambda x: x.__dlpack__(), "to_local"),
    "from_dlpack": (torch.from_dlpack, "to_local"),
    "to_dlpack": (torch.utils.dlpack.to_dlpack, None),
    "memoryview": (memoryview, None),
    "frombuffer": (lambda x: torch.frombuffer(x, dtype=torch.float32), None),
    "from_numpy": (torch.from_numpy, None),
    "array interface": (lambda x: x.__array_interface__, None),
    "cuda array interface": (lambda x: x.__cuda_array_interface__, None),
    "pickle": (pickle.dumps, "vescale_ckpt"),
    "pickle of a module": (lambda x: pickle.dumps(module_with(x)), "vescale_ckpt"),
    "torch.save": (lambda x: saved({"a": [x]}), "vescale_ckpt"),
    "torch.save, legacy": (lambda x: saved(x, **LEGACY), "vescale_ckpt"),
    "torch.save of an optimizer": (lambda x: saved(optimizer_state(x)), "vescale_ckpt"),
    # Constructors that read memory, and wrappers around a wrapper.
    "asarray with a copy": (lambda x: torch.asarray(x, copy=True), "to_local"),
    "nested tensors": (lambda x: nested.nested_tensor([x, x]), "to_local"),
    "jagged tensors": (lambda x: nested.as_nested_tensor([x, x], layout=torch.jagged), "to_local"),
    "sparse values": (lambda x: torch.sparse_coo_tensor(AT[None], x[0:2, 0]), "to_local"),
    "as_strided": (lambda x: x.as_strided((2, 2), (2, 1), 0), "to_local"),
    "resize_": (lambda x: x.resize_(2, 2), "to_local"),
    # Assignments of plain tensors, whose layout nobody knows.
    "data = plain": (lambda x: written(x, "data", WHOLE), "distribute_tensor"),
    "grad = plain": (lambda x: written(x, "grad", WHOLE), "from_local"),
    "set_ to plain": (lambda x: x.set_(WHOLE), "to_local"),
    "plain.set_": (lambda x: WHOLE.clone().set_(x), "to_local"),
    "set_ to a storage": (lambda x: x.set_(WHOLE.clone().untyped_storage()), "to_local"),
    "swap_tensors with plain": (lambda x: torch.utils.swap_tensors(x, WHOLE.clone()), None),
    # C++ without overrides.
    "no overrides": (lambda x: without_overrides(lambda: torch.add(x, x)), "to_local"),
    "no overrides, tril": (lambda x: without_overrides(x.tril), "to_local"),
    "to_functional": (lambda x: torch._to_functional_tensor(x) * 2, "to_local"),
    # Tracers and transforms, of a DTensor and around one.
    "make_fx": (make_fx(lambda a: a * 2), "to_local|local tensors"),
    "make_fx around": (lambda x: make_fx(lambda a: a * x)(WHOLE), "local tensors"),
    "export": (lambda x: torch.export.export(module_with(x), (WHOLE,)), "to_local"),
    # A compiled call does not ask whether it is traced: then torch refuses the wrapper as an input.
    "jit.trace": (lambda x: torch.jit.trace(lambda a: a * 2, (x,)), "local|data is not allocated"),
    "jit.trace around": (lambda x: torch.jit.trace(lambda a: a * x, (WHOLE,)), "local tensors"),
    # Traced tensors are plain, and calls that mix them with DTensors ask each time.
    "jit.trace around known calls": (
        lambda x: torch.jit.trace(known(lambda a: (a * x) + x * x, WHOLE), (WHOLE,)),
        "local tensors",
    ),
    "jit.trace around a captured function": (
        lambda x: torch.jit.trace(known(vd.capture(lambda a: a * x), WHOLE), (WHOLE,)),
        "local tensors",
    ),
    "jit.trace of a module": (lambda x: torch.jit.trace(module_with(x), (WHOLE,)), OURS),
    "jit.script": (lambda x: torch.jit.script(module_with(x))(WHOLE), None),
    "vmap": (torch.vmap(lambda a: a * 2), "to_local"),
    "vmap around": (lambda x: torch.vmap(lambda a: a * x[0])(WHOLE), "transform"),
    "func.grad": (torch.func.grad(lambda a: (a * a).sum()), "to_local"),
    "func.grad around": (lambda x: torch.func.grad(lambda a: (a * x).sum())(WHOLE), "transform"),
    "func.vjp": (lambda x: torch.func.vjp(lambda a: (a * a).sum(), x), "to_local"),
    "func.jvp": (lambda x: torch.func.jvp(lambda a: a * a, (x,), (x,)), "to_local"),
    "func.jvp around": (
        lambda x: torch.func.jvp(lambda a: (a * x).sum().full_tensor(), (WHOLE,), (WHOLE,)),
        "transform",
    ),
    "func.linearize": (lambda x: torch.func.linearize(lambda a: a * a, x), "to_local"),
    "func.functionalize": (torch.func.functionalize(lambda a: a * a), "to_local"),
    "from_local in a transform": (
        lambda x: torch.func.grad(
            lambda a: vd.DTensor.from_local(a * 1, x.device_mesh, [Replicate()] * 2).sum().item()
        )(WHOLE),
        "transform",
    ),
    "batched gradients": (
        lambda x: torch.autograd.grad(
            (x.requires_grad_() * 2), x, torch.stack([WHOLE, WHOLE]), is_grads_batched=True
        ),
        "each row",
    ),
    "gradient edges": (
        lambda x: torch.autograd.grad(
            (x.requires_grad_() * 2).sum(), torch.autograd.graph.get_gradient_edge(x)
        ),
        "tensor itself",
    ),
    "hooks on a node": (lambda x: node_of(x).register_hook(print), "on the tensor"),
    "prehooks on a node before": (
        lambda x: node_of(x).next_functions[0][0].register_prehook(print),
        "on the tensor",
    ),
    "hooks on several tensors": (lambda x: hooked_together(x.requires_grad_()), None),
    # What shards tensors of its own kind.
    "DDP": (lambda x: DistributedDataParallel(module_with(x)), "to_torch"),
    "FSDP1": (lambda x: FSDP(module_with(x), device_id=torch.device("cpu")), "to_local"),
    "FSDP2": (lambda x: fully_shard(module_with(x), mesh=x.device_mesh["dp"]), FSDP2),
    "FSDP2 with pieces of nothing": (lambda x: fully_shard(module_with(x)), FSDP2),
    "torch's DTensor around ours": (
        lambda x: TorchDTensor.from_local(x, x.device_mesh, [TorchShard(0)] * 2) * 2,
        "to_torch",
    ),
    "torch's parallel styles": (
        lambda x: parallel.parallelize_module(
            module_with(x), x.device_mesh["tp"], parallel.ColwiseParallel()
        ),
        OURS,
    ),
}


# Older torch has no such door.
if not hasattr(torch.Tensor, "const_data_ptr"):
    del CLOSED["const_data_ptr"]


@pytest.mark.parametrize("name", CLOSED)
@on_ranks(4)
def test_closed(name):
    mesh = device_mesh((2, 2), ("dp", "tp"))
    door, words = CLOSED[name]
    x = Place(mesh)(WHOLE)
    # Tracing refuses in our words or, where the call is known by then, in torch's.
    torchs = words is None or "is not allocated" in words
    expected = (DTensorError, *IN_ITS_OWN_WORDS) if torchs else DTensorError
    # Some ways to a door lead through code of torch that it has deprecated itself.
    with warnings.catch_warnings(action="ignore"), pytest.raises(expected, match=words or None):
        door(x)


NUMPY = (np.sqrt, np.transpose, np.stack)
OPEN = {
    "item": lambda p: p(WHOLE).sum().item(),
    "tolist": lambda p: p(WHOLE).tolist(),
    "numpy": lambda p: p(WHOLE).numpy().tolist(),
    "np.array": lambda p: np.array(p(WHOLE)).tolist(),
    "np.asarray": lambda p: np.asarray(p(WHOLE).sum(0)).tolist(),
    "np.asarray with a dtype": lambda p: np.asarray(p(WHOLE), dtype=np.float64).tolist(),
    "numpy functions": lambda p: [torch.as_tensor(f(p(WHOLE))) for f in NUMPY],
    "torch.tensor of numbers": lambda p: torch.tensor([p(WHOLE).sum(), p(WHOLE).mean()]),
    "torch.tensor, nested": lambda p: torch.tensor([[p(WHOLE).sum()], [p(WHOLE).max()]]),
    "as_tensor of numbers": lambda p: torch.as_tensor([p(WHOLE).sum()]),
    "as_tensor": lambda p: torch.as_tensor(p(WHOLE)),
    "as_tensor with a dtype": lambda p: torch.as_tensor(p(WHOLE), dtype=torch.float64),
    "torch.tensor": lambda p: torch.tensor(p(WHOLE)),
    "torch.tensor is a copy": lambda p: (
        x := p(WHOLE),
        torch.tensor(x, dtype=torch.double).add_(1),
    ),
    "torch.tensor of indices": lambda p: torch.tensor(
        [[p(WHOLE).argmax(), 2], [3, p(WHOLE).sum()]]
    ),
    "torch.tensor of truths": lambda p: torch.tensor([(p(WHOLE) > 3).any(), True]),
    "torch.Tensor": lambda p: torch.Tensor(p(WHOLE)),
    "new_tensor": lambda p: p(WHOLE).new_tensor(p(WHOLE)),
    "as_subclass": lambda p: p(WHOLE).as_subclass(torch.Tensor),
    "_make_subclass": lambda p: torch.Tensor._make_subclass(torch.Tensor, p(WHOLE)),
    "asarray": lambda p: torch.asarray(p(WHOLE)),
    "from_numpy": lambda p: torch.from_numpy(np.asarray(p(WHOLE))),
    "methods without overrides": lambda p: without_overrides(lambda: p(WHOLE) + p(WHOLE).clone()),
    "torch.full": lambda p: torch.full((2,), p(WHOLE).sum()),
    "torch.full_like": lambda p: torch.full_like(WHOLE, p(WHOLE).sum()),
    "full_like of ours": lambda p: torch.full_like(p(WHOLE), p(WHOLE).sum()),
    "new_full": lambda p: p(WHOLE).new_full((2,), p(WHOLE).sum()),
    "torch.arange": lambda p: torch.arange(p(WHOLE).max()),
    "torch.arange with bounds": lambda p: torch.arange(p(WHOLE).min(), p(WHOLE).max(), 5),
    "torch.linspace": lambda p: torch.linspace(0, p(WHOLE).sum(), 3),
    "scalar_tensor": lambda p: torch.scalar_tensor(p(WHOLE).sum()),
    "fill_ of a plain tensor": lambda p: torch.zeros(2).fill_(p(WHOLE).sum()),
    "an item of a plain tensor": lambda p: torch.zeros(2).index_fill_(
        0, AT[1:], p(WHOLE).sum().item()
    ),
    "shapes from values": lambda p: torch.zeros(int(p(WHOLE).max() // 12)),
    "range": lambda p: list(range(p(WHOLE).max().long())),
    "a slice": lambda p: list(range(30))[: p(WHOLE).max().long()],
    "aten.item": lambda p: torch.ops.aten.item(p(WHOLE).sum()),
    "aten ops": lambda p: [
        torch.ops.aten.add.Tensor(p(WHOLE), p(WHOLE)),
        torch.ops.aten.mm(p(WHOLE), p(WHOLE).t()),
        torch.ops.prims.mul(p(WHOLE), p(WHOLE)),
    ],
    "private spellings": lambda p: [
        torch._C._nn.gelu(p(WHOLE)),
        torch._C._nn.linear(p(WHOLE), p(WHOLE)),
        torch._C._VariableFunctions.add(p(WHOLE), p(WHOLE)),
        torch._C.TensorBase.add(p(WHOLE), p(WHOLE)),
    ],
    "sparse product": lambda p: torch.sparse.mm(torch.eye(6).to_sparse(), p(WHOLE)),
    "to_sparse": lambda p: _of_its_values(p(WHOLE).to_sparse(), p),
    "to_sparse_csr": lambda p: p(WHOLE).to_sparse_csr().to_dense(),
    "to_mkldnn": lambda p: p(WHOLE).to_mkldnn().to_dense(),
    "quantize": lambda p: torch.quantize_per_tensor(p(WHOLE), 0.1, 0, torch.qint8).dequantize(),
    "fake quantization": lambda p: torch.fake_quantize_per_tensor_affine(
        p(WHOLE), 0.5, 0, -128, 127
    ),
    "default_collate": lambda p: torch.utils.data.default_collate([p(WHOLE), p(WHOLE)]),
    "swap_tensors": lambda p: _swapped(p(WHOLE), p(WHOLE * 2, Shard(1), Replicate())),
    "set_": lambda p: p(WHOLE).set_(p(WHOLE * 2)),
    "set_ to another order": lambda p: _strided(p(WHOLE).set_(p(WHOLE.t().contiguous()).t())),
    "data": lambda p: _with_data(p(WHOLE), p(WHOLE.double()[:3])),
    "fx.symbolic_trace": lambda p: torch.fx.symbolic_trace(_linear(p))(WHOLE),
    "functional_call": lambda p: torch.func.functional_call(
        _linear(p), {"weight": p(WHOLE)}, (WHOLE,)
    ),
    "stack_module_state": lambda p: torch.func.stack_module_state([_linear(p), _linear(p)])[0],
    "DDP with inputs of ours": lambda p: _through_ddp(p),
    "state dicts": lambda p: get_model_state_dict(_linear(p)),
    "checkpoints are loaded": lambda p: _loaded(p),
}


def _of_its_values(sparse, place):
    """A sparse tensor meets a DTensor again."""
    return sparse.to_dense(), torch.sparse.mm(sparse, place(WHOLE).t())


def _swapped(first, second):
    torch.utils.swap_tensors(first, second)
    return first, second


def _strided(x):
    return x, x.stride(), x.is_contiguous(), tuple(x.size())


def _with_data(x, value):
    x.data = value
    return x, tuple(x.size()), x.numel(), x.element_size(), x.stride(), str(x.dtype)


def _linear(place):
    module = nn.Linear(4, 6)
    nn.init.zeros_(module.bias)
    module.weight = place.parameter(WHOLE)
    return module


def _through_ddp(place):
    torch.manual_seed(1)
    module = nn.Linear(4, 6)
    if place.mesh is not None:
        module = DistributedDataParallel(module)
    module(place(WHOLE)).square().sum().backward()
    return [parameter.grad for parameter in module.parameters()]


def _loaded(place):
    if place.mesh is None:
        return WHOLE
    folder = [tempfile.mkdtemp()]
    torch.distributed.broadcast_object_list(folder)
    with warnings.catch_warnings(action="ignore"):
        dcp.save({"x": WHOLE}, checkpoint_id=folder[0])
        target = place(WHOLE * 0)
        dcp.load({"x": target}, checkpoint_id=folder[0])
    return target


@pytest.mark.parametrize("name", OPEN)
@on_ranks(4)
def test_open(name):
    check(OPEN[name])
