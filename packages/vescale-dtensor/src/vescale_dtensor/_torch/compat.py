"""The one list of torch's private API that this package uses, feature-tested, with fallbacks."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.distributed.tensor import placement_types
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import _foreach_utils, _python_dispatch

_dtensor_new: Any = getattr(torch.Tensor, "_dtensor__new__", None)


def _wrapper_subclass(cls: type, local: Tensor, spec: Any, *, requires_grad: bool) -> Any:
    """Build a wrapper without the C++ constructor that stock DTensor uses (slower by 0.65 µs)."""
    meta = spec.tensor_meta
    wrapper: Any = torch.Tensor._make_wrapper_subclass(
        cls,
        meta.shape,
        strides=meta.stride,
        dtype=meta.dtype,
        device=local.device,
        requires_grad=requires_grad,
    )
    wrapper._local_tensor, wrapper._spec = local, spec
    return wrapper


new_wrapper: Any = _dtensor_new if _dtensor_new is not None else staticmethod(_wrapper_subclass)
"""`new_wrapper(cls, local, spec, requires_grad=...)`: a wrapper with the spec's global metadata."""

close_memory: Any = getattr(torch._C, "_set_throw_on_mutable_data_ptr", lambda _: None)
"""Make C++ code that asks for a wrapper's memory (gloo, NCCL, DLPack) raise: it would get null."""

without_overrides: Any = torch._C.DisableTorchFunctionSubclass
"""Context in which a wrapper's own C++ metadata can be read."""


no_torch_function: Any = torch._C.DisableTorchFunction
"""Context in which torch function modes see nothing: for checks that are no part of a program."""


def join_foreach(cls: type) -> None:
    """Let optimizers and clipping use their multi-tensor forms for `cls`, as stock DTensor does.

    The one import side effect of this package.
    """
    for module in (_foreach_utils, import_module("torch.optim.optimizer")):
        known = getattr(module, "_foreach_supported_types", None)
        if isinstance(known, list) and cls not in known:
            known.append(cls)


dispatch_modes: Any = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)

"""How many dispatch modes (make_fx, FakeTensorMode, counters) are active."""


no_dispatch_modes: Any = getattr(_python_dispatch, "_disable_current_modes", nullcontext)
"""Context in which dispatch modes see nothing: for checks that are no part of a program."""


def fake_tensors() -> Any:
    """Context in which factories make tensors that have a device and strides, but no data."""
    return FakeTensorMode()


_jit_traces: Any = getattr(torch._C, "_is_tracing", lambda: False)


def is_traced() -> bool:
    """Whether make_fx, torch.export or torch.jit.trace records the calls of this thread.

    Cheap when nobody does.
    """
    return bool(_jit_traces()) or (dispatch_modes() > 0 and get_proxy_mode() is not None)


_transforms_active: Any = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)
_is_transformed: Any = getattr(torch._C._functorch, "is_functorch_wrapped_tensor", lambda _: False)


def is_transformed(tensor: Tensor) -> bool:
    """Whether a plain tensor stands for something else: in vmap, torch.func.grad, forward mode."""
    if _transforms_active() and _is_transformed(tensor):
        return True
    if getattr(forward_ad, "_current_level", 0) < 0:
        return False
    dual: Any = forward_ad.unpack_dual(tensor)  # type: ignore[no-untyped-call]
    return dual.tangent is not None


def applied(function: type[torch.autograd.Function]) -> Any:
    """`function.apply` without its look at functorch's transforms, which is half of what it costs.

    Plain tensors of a transform are refused where they meet a DTensor: see `is_transformed`.
    """
    return getattr(super(torch.autograd.Function, function), "apply", function.apply)


_grad_fn: Any = torch._C.TensorBase.grad_fn
_grad: Any = torch._C.TensorBase.grad
_requires_grad: Any = torch._C.TensorBase.requires_grad


def hidden_node(wrapper: Tensor) -> Any:
    """The autograd node that C++ gave a wrapper behind our back; None for all of our own."""
    with without_overrides():
        return _grad_fn.__get__(wrapper)


def marked_to_want_gradients(wrapper: Tensor) -> bool:
    """Whether C++ noted that gradients are wanted: of an input that a checkpoint kept, it does."""
    with without_overrides():
        return bool(_requires_grad.__get__(wrapper))


def own_gradient(wrapper: Tensor) -> Tensor | None:
    """What C++ accumulated on a wrapper; ours are on the locals."""
    with without_overrides():
        found: Tensor | None = _grad.__get__(wrapper)
        return found


def engine_gradients(
    roots: Sequence[Tensor], starts: Sequence[Tensor], inputs: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """`torch.autograd.grad` on the graph that C++ keeps on wrappers; the graph is retained.

    Not under `without_overrides`: that would reach into the backward functions that it runs.
    """
    run = torch.autograd.Variable._execution_engine.run_backward
    found: tuple[Tensor | None, ...] = run(
        tuple(roots),
        tuple(starts),
        True,
        torch.is_grad_enabled(),
        tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=False,
    )
    return found


_swap: Any = getattr(torch._C, "_swap_tensor_impl", None)


def swap_metadata(first: Tensor, second: Tensor) -> bool:
    """Exchange what C++ knows of two wrappers: graph, hooks, metadata. Whether it could be done."""
    if _swap is None:
        return False
    try:
        _swap(first, second)
    except RuntimeError:  # C++ itself holds one of them
        return False
    return True


_hooks: Any = torch._C.TensorBase._backward_hooks


def hook_own_gradient(wrapper: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Call `hook` with a gradient that C++ is about to accumulate on a wrapper itself.

    `Tensor.register_hook` would ask the wrapper for its `grad_fn`, which is the local's.
    """
    with without_overrides():
        _hooks.__set__(wrapper, OrderedDict({0: hook}))


def mirror_requires_grad(wrapper: Tensor, value: bool) -> None:
    """Set the wrapper's own C++ flag, by which a custom autograd.Function notices it."""
    with without_overrides():
        torch._C.TensorBase.requires_grad_(wrapper, value)


_data: Any = torch._C.TensorBase.data


def mirror_metadata(wrapper: Tensor, other: Tensor) -> None:
    """Give a wrapper the shape, strides and dtype that C++ knows of another one."""
    with without_overrides():
        _data.__set__(wrapper, other)


def materialized(cotangent: Tensor) -> Tensor:
    """A cotangent with strides and memory: symbolic zeros (of `sgn`, say) have none to send."""
    if cotangent.layout is not torch.strided:
        return cotangent.to_dense()  # of an embedding, say, that makes sparse gradients
    return cotangent.new_zeros(cotangent.shape) if cotangent._is_zerotensor() else cotangent


torch_strided_shard: type | None = getattr(placement_types, "_StridedShard", None)
"""torch's placement for a cut inside that of a later mesh axis; None where torch has none."""


_mesh_environment: Any = getattr(
    import_module("torch.distributed.device_mesh"), "_mesh_resources", None
)


def entered_mesh() -> Any:
    """The innermost mesh that was entered by `with mesh:`; None where there is none."""
    stack = getattr(_mesh_environment, "mesh_stack", None)
    return stack[-1] if stack else None


def storage_identity(tensor: Tensor) -> int:
    """A number that tensors share exactly if they share a storage, also one of no bytes."""
    storage = tensor.untyped_storage()
    return int(getattr(storage, "_cdata", 0)) or storage.data_ptr()


set_grad_mode: Any = torch._C._set_grad_enabled
"""`set_grad_mode(enabled)`: what `torch.set_grad_enabled` calls, without its context manager."""

overrides_enabled: Any = torch._C._is_torch_function_enabled
"""Whether wrappers' own overrides are on in this thread (`without_overrides` turns them off)."""


any_autocast: Any = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
"""Whether autocast may be on for some device type."""


def saved_tensor_hooks() -> bool:
    """Whether tensors that autograd saves pass through hooks here: checkpointing, offloading."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is not None and top(True) is not None


def generator_states() -> tuple[bytes, ...]:
    """Where the default random generators stand: of the CPU, and of CUDA once it is in use."""
    states = [torch.default_generator.get_state().numpy().tobytes()]
    initialized: Any = torch.cuda.is_initialized
    if initialized() and not torch.cuda.is_current_stream_capturing():
        states += [g.get_state().numpy().tobytes() for g in torch.cuda.default_generators]
    return tuple(states)


def set_generator_states(states: tuple[bytes, ...]) -> None:
    """Move the default random generators to where `generator_states` found them."""
    generators = [torch.default_generator, *(torch.cuda.default_generators if states[1:] else ())]
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def global_module_hooks() -> list[Any]:
    """The dicts of hooks that torch calls for every module."""
    module = import_module("torch.nn.modules.module")
    names = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
    found = [getattr(module, f"_global_{name}", None) for name in names]
    return [hooks for hooks in found if hooks is not None]


variable_functions: Any = getattr(torch, "_VF", None)
"""torch's functions as its own Python code calls them; None where they cannot be had."""


def lost_argument(function: Any, name: str) -> Any:
    """An argument that a Python function of torch was called with and forgot to hand on.

    `torch.nn.functional.l1_loss` (torch 2.13) leaves `weight` out where it asks for overrides. Only
    its frame, which waits for the answer, still has it.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    return None if frame is None else frame.f_locals.get(name)


_custom_op_definition: Any = getattr(
    import_module("torch._library.custom_ops"), "CustomOpDef", None
)


def overload_of_custom_op(function: Any) -> Any:
    """The operator behind what `torch.library.custom_op` returns; None for anything else.

    Where a later torch keeps it elsewhere, users name the operator: `torch.ops.mylib.myop`.
    """
    if _custom_op_definition is None or not isinstance(function, _custom_op_definition):
        return None
    return getattr(function, "_opoverload", None)


def written_arguments(overload: Any) -> tuple[list[str], bool]:
    """Names of the arguments that an operator writes to (`out=` aside); whether it returns one.

    Of what has no schema that torch would tell, none.
    """
    schema = getattr(overload, "_schema", None)
    if schema is None:
        return [], False
    aliased = [a for a in schema.arguments if a.alias_info is not None and not a.kwarg_only]
    written = [a.name for a in aliased if a.alias_info.is_write]
    return written, any(r.alias_info is not None for r in schema.returns)


_OVERLOAD, _PACKET = type(torch.ops.aten.add.Tensor), type(torch.ops.aten.add)


def overloads_of(op: Any) -> list[Any]:
    """Schemas of a registered op: of an overload its own, of a name those of all its overloads."""
    if isinstance(op, _OVERLOAD):
        return [op._schema]
    if isinstance(op, _PACKET):
        names: Any = op.overloads
        return [getattr(op, name)._schema for name in names()]
    return []


def name_of_overload(op: Any) -> Any:
    """A registered op as it is called without naming an overload; None if it is no such op."""
    return (
        op.overloadpacket if isinstance(op, _OVERLOAD) else op if isinstance(op, _PACKET) else None
    )


def asked_by_torch_dtensor() -> bool:
    """Whether a module of `torch.distributed.tensor` reads the attribute whose getter asks this."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") == "torch._opaque_base":
        frame = frame.f_back  # the `isinstance` of torch's placements is a Python function
    name = "" if frame is None else str(frame.f_globals.get("__name__"))
    return name.startswith("torch.distributed.tensor")
