"""The list of torch's private API that this package uses, feature-tested, with fallbacks.

But for what tells that torch.func or forward mode is at work: `transforms`.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import placement_types
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import _foreach_utils, _python_dispatch
from torch.utils._device import DeviceContext

Function = Callable[..., Any]

compiler_callback: Callable[[], Any] = getattr(
    getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None),
    "get_eval_frame_callback",
    lambda: None,
)
"""What torch.compile has asked Python to call for each new frame; None outside of what it runs."""

_dtensor_new: Any = getattr(torch.Tensor, "_dtensor__new__", None)


def _wrapper_subclass(cls: type, local: Tensor, spec: Any, requires_grad: bool) -> Any:
    """Construct a wrapper without the C++ constructor of stock DTensor (slower by 0.65 us)."""
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
"""`new_wrapper(cls, local, spec, requires_grad)`: a wrapper with the spec's global metadata.

By position: a name costs a tenth of what the constructor does.
"""

# Without it, such code gets the null pointer.
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
    # torch has two such lists, one for its utilities (clipping) and one for optimizers.
    for module in (_foreach_utils, import_module("torch.optim.optimizer")):
        known = getattr(module, "_foreach_supported_types", None)
        if isinstance(known, list) and cls not in known:
            known.append(cls)


# Without it, whatever runs without grad may be the forward of a custom Function.
forward_grad_enabled: Any = getattr(torch._C, "_is_fwd_grad_enabled", torch.is_grad_enabled)
"""False while the forward of a custom autograd.Function runs, also where that enables grad: C++
turns forward mode off beside grad mode, and `torch.enable_grad` turns only grad mode on again.
`torch.no_grad` leaves it on."""


dispatch_modes: Any = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
"""How many dispatch modes (make_fx, FakeTensorMode, counters) are active."""


_task: Any = getattr(torch._C, "_current_graph_task_id", lambda: -1)


def in_backward() -> bool:
    """Whether this thread runs a backward."""
    return bool(_task() != -1)


def function_modes() -> bool:
    """Whether a mode of the user's sees torch functions: not that of a default device."""
    at, depth = torch._C._get_function_stack_at, torch._C._len_torch_function_stack()
    return depth > 0 and any(not isinstance(at(i), DeviceContext) for i in range(depth))


no_dispatch_modes: Any = getattr(_python_dispatch, "_disable_current_modes", nullcontext)
"""Context in which dispatch modes see nothing: for checks that are no part of a program."""


def fake_tensors() -> Any:
    """Context in which factories return tensors that have a device and strides, but no data."""
    return FakeTensorMode()


@contextmanager
def asking_fake_tensors() -> Iterator[None]:
    """The same for a question that torch may not answer, for which its caller has another way.

    Where an operator refuses them, torch logs the error with its trace besides raising it. That is
    left out: nothing has failed, and people would take it for an error of their program.
    """
    log, thread = logging.getLogger(FakeTensorMode.__module__), threading.get_ident()

    def is_of_others(record: logging.LogRecord) -> bool:
        return record.thread != thread

    log.addFilter(is_of_others)
    try:
        with fake_tensors():
            yield
    finally:
        log.removeFilter(is_of_others)


# torch.jit.trace is no dispatch mode, so it is asked separately.
jit_traces: Any = getattr(torch._C, "_is_tracing", lambda: False)
"""Whether torch.jit.trace records the calls of this thread."""


def is_traced() -> bool:
    """Whether make_fx, torch.export or torch.jit.trace records the calls of this thread.

    Cheap while no dispatch mode is active.
    """
    return bool(jit_traces()) or (dispatch_modes() > 0 and get_proxy_mode() is not None)


def traced_graph() -> Any:
    """The `torch.fx.Graph` that make_fx writes at the moment; None where nobody traces."""
    mode: Any = get_proxy_mode()
    return None if mode is None else getattr(mode.tracer, "graph", None)


def applied(function: type[torch.autograd.Function]) -> Any:
    """Return `function.apply` without its test for functorch transforms, which is half of its cost.

    Plain tensors of a transform are refused where they meet a DTensor; see `is_transformed`.
    """
    # The C++ base class' `apply`, which torch's Python `apply` calls after that test.
    return getattr(super(torch.autograd.Function, function), "apply", function.apply)


apply_code: Any = getattr(
    getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None
)
"""The code of `torch.autograd.Function.apply`; None where it is no Python function."""


# C-level getters of the base class: the properties of `DTensor` by these names answer for the local
# tensor.
_grad_fn: Any = torch._C.TensorBase.grad_fn
_grad: Any = torch._C.TensorBase.grad
_requires_grad: Any = torch._C.TensorBase.requires_grad


def hidden_node(wrapper: Tensor) -> Any:
    """Return the autograd node that C++ gave a wrapper; None for wrappers that our code made."""
    with without_overrides():
        return _grad_fn.__get__(wrapper)


def marked_to_want_gradients(wrapper: Tensor) -> bool:
    """Whether C++ marked a wrapper as requiring grad, as it does for a checkpoint's inputs."""
    with without_overrides():
        return bool(_requires_grad.__get__(wrapper))


any_requires_grad: Any = getattr(
    torch._C, "_any_requires_grad", lambda *wrappers: any(map(marked_to_want_gradients, wrappers))
)
"""`any_requires_grad(*wrappers)`: whether C++ has marked one of them; costs 0.1 us."""


_output_number: Any = torch._C.TensorBase.output_nr


def hidden_output_number(wrapper: Tensor) -> int:
    """Which output of its hidden node a wrapper is."""
    with without_overrides():
        return int(_output_number.__get__(wrapper))


stored_gradient: Any = _grad.__get__
"""Return the gradient that C++ accumulated on a wrapper itself; ours are on local tensors.

To be called `without_overrides`, or it is asked for by `DTensor.grad`.
"""


def engine_gradients(
    roots: Sequence[Tensor], starts: Sequence[Tensor], inputs: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """`torch.autograd.grad` on the graph that C++ keeps on wrappers; the graph is retained.

    Args:
        roots: wrappers to start from.
        starts: their cotangents.
        inputs: tensors whose gradients are returned; nothing is accumulated.

    Returns:
        One gradient per input; None where none arrives.
    """
    # Not under `without_overrides`: that would reach into the backward functions that the engine
    # runs.
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
    """Exchange what C++ knows of two wrappers: graph, hooks, metadata. Returns whether it could."""
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

    `Tensor.register_hook` would ask the wrapper for its `grad_fn`, which is that of the local
    tensor.
    """
    with without_overrides():
        _hooks.__set__(wrapper, OrderedDict({0: hook}))


def mirror_requires_grad(wrapper: Tensor, value: bool) -> None:
    """Set the wrapper's own C++ flag, by which a custom autograd.Function notices it."""
    with without_overrides():
        torch._C.TensorBase.requires_grad_(wrapper, value)


def detach_own(wrapper: Tensor) -> None:
    """Remove the graph that C++ keeps on a wrapper: `Tensor.detach_` of the wrapper alone."""
    with without_overrides():
        torch._C.TensorBase.detach_(wrapper)


_data: Any = torch._C.TensorBase.data


def mirror_metadata(wrapper: Tensor, other: Tensor) -> None:
    """Give a wrapper the shape, strides and dtype that C++ knows of another one."""
    # Assigning `.data` replaces the C++ metadata; the wrappers have no data that it could change.
    with without_overrides():
        _data.__set__(wrapper, other)


def materialized(cotangent: Tensor) -> Tensor:
    """Return a cotangent with strides and memory, so that a collective can send it.

    Symbolic zeros (the gradient of `sgn`, for example) have no memory, and sparse gradients (of an
    embedding, for example) no strides.
    """
    if cotangent.layout is not torch.strided:
        return cotangent.to_dense()
    return cotangent.new_zeros(cotangent.shape) if cotangent._is_zerotensor() else cotangent


def with_own_elements(gradient: Tensor) -> Tensor:
    """Return a gradient whose elements have each their own memory: a copy of an expanded one.

    The gradient of a sum is expanded. On one device torch refuses to write to it; of shards it
    would refuse only those with several elements, on some ranks.
    """
    pairs = zip(gradient.shape, gradient.stride(), strict=True)
    return gradient.clone() if any(n > 1 and not step for n, step in pairs) else gradient


torch_strided_shard: type | None = getattr(placement_types, "_StridedShard", None)
"""torch's placement for a dim that a later mesh axis shards first; None where torch has none."""


_mesh_environment: Any = getattr(
    import_module("torch.distributed.device_mesh"), "_mesh_resources", None
)


def keeps_rank_order(mesh: Any) -> bool:
    """Whether the groups of a mesh have its order of ranks (`preserve_rank_order=`, torch 2.15)."""
    return getattr(mesh, "_preserve_rank_order", False)


def entered_mesh() -> Any:
    """Return the innermost mesh entered by `with mesh:`; None if there is none."""
    stack = getattr(_mesh_environment, "mesh_stack", None)
    return stack[-1] if stack else None


def storage_identities(tensors: Sequence[Tensor]) -> list[int]:
    """Return `storage_identity` of each, at the cost of one."""
    try:
        found: list[int] = [one.untyped_storage()._cdata for one in tensors]
    except AttributeError:  # of the storage: another torch may not have it
        found = []
    return found if found and all(found) else [storage_identity(one) for one in tensors]


def storage_identity(tensor: Tensor) -> int:
    """Return a number that tensors share exactly if they share a storage, also one of no bytes."""
    # The address of the storage object. The data pointer, its fallback, is 0 for every empty
    # storage.
    storage = tensor.untyped_storage()
    address: int | None = getattr(storage, "_cdata", None)
    return address or storage.data_ptr()


set_grad_mode: Any = torch._C._set_grad_enabled
"""`set_grad_mode(enabled)`: what `torch.set_grad_enabled` calls, without its context manager."""

overrides_enabled: Any = torch._C._is_torch_function_enabled
"""Whether wrappers' own overrides are on in this thread (`without_overrides` turns them off)."""


any_autocast: Any = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
"""Whether autocast may be on for some device type."""


def saved_tensor_hooks() -> Any:
    """The hooks that tensors pass through which autograd saves here (checkpointing); None: none."""
    # True: also the hooks that torch ignores while it traces.
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return None if top is None else top(True)


def generator_states() -> tuple[bytes, ...]:
    """Return the states of the default generators: the CPU's, and CUDA's once it is in use."""
    states = [torch.default_generator.get_state().numpy().tobytes()]
    initialized: Any = torch.cuda.is_initialized
    # Asking an uninitialized CUDA would initialize it, and a captured graph must not read its
    # state.
    if initialized() and not torch.cuda.is_current_stream_capturing():
        states += [g.get_state().numpy().tobytes() for g in torch.cuda.default_generators]
    return tuple(states)


def set_generator_states(states: tuple[bytes, ...]) -> None:
    """Return the default random generators to the states that `generator_states` found."""
    generators = [torch.default_generator, *(torch.cuda.default_generators if states[1:] else ())]
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether functions of the user's run around each step of an optimizer."""
    own, common = vars(optimizer), vars(import_module("torch.optim.optimizer"))
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    shared = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
    everywhere = [hook for name in shared for hook in common.get(name, {}).values()]
    # These packages' own note which tensors a step writes to, however often it runs.
    users = [h for h in everywhere if not getattr(h, "__module__", "").startswith("vescale_")]
    return any(map(own.get, names)) or bool(users)


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Let schedulers see that an optimizer has stepped, where it was not by its `step`."""
    # As the wrapper does that schedulers put around `step`.
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        vars(optimizer)["_opt_called"] = True


def global_module_hooks() -> list[Any]:
    """Return the dicts of hooks that torch calls for every module."""
    module = import_module("torch.nn.modules.module")
    names = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
    found = [getattr(module, f"_global_{name}", None) for name in names]
    return [hooks for hooks in found if hooks is not None]


variable_functions: Any = getattr(torch, "_VF", None)
"""torch's functions as its own Python code calls them; None where they cannot be had."""


_custom_op_definition: Any = getattr(
    import_module("torch._library.custom_ops"), "CustomOpDef", None
)


def overload_of_custom_op(function: Any) -> Any:
    """Return the operator behind the object that `torch.library.custom_op` returns; else None.

    Where a later torch stores it elsewhere, users can name the operator: `torch.ops.mylib.myop`.
    """
    if _custom_op_definition is None or not isinstance(function, _custom_op_definition):
        return None
    return getattr(function, "_opoverload", None)


def written_arguments(overload: Any) -> tuple[list[str], bool]:
    """Return the names of the arguments that an operator writes to, and whether it returns one.

    Arguments of `out=` are left out. An object without a schema writes to none, as far as torch
    tells.
    """
    schema = getattr(overload, "_schema", None)
    if schema is None:
        return [], False
    aliased = [a for a in schema.arguments if a.alias_info is not None and not a.kwarg_only]
    written = [a.name for a in aliased if a.alias_info.is_write]
    return written, any(r.alias_info is not None for r in schema.returns)


_OVERLOAD, _PACKET = type(torch.ops.aten.add.Tensor), type(torch.ops.aten.add)


def overloads_of(op: Any) -> list[Any]:
    """Return the schemas of a registered op: one overload's, or those of all its overloads."""
    if isinstance(op, _OVERLOAD):
        return [op._schema]
    if isinstance(op, _PACKET):
        names: Any = op.overloads
        return [getattr(op, name)._schema for name in names()]
    return []


generated_namespaces: tuple[Any, ...] = (
    getattr(torch._C, "_VariableFunctions", torch),
    torch._C.TensorBase,
    getattr(torch._C, "_nn", torch),
)
"""Where torch keeps the functions that it generates from the schemas of its operators."""


def returns_list(op: Any) -> bool:
    """Whether a registered op returns one list of tensors."""
    schemas = overloads_of(op)
    returned = schemas[0].returns if schemas else []
    return len(returned) == 1 and str(returned[0].type) == "List[Tensor]"


def name_of_overload(op: Any) -> Any:
    """Return the op whose overload this is, or the op itself; None if it is no registered op."""
    return (
        op.overloadpacket if isinstance(op, _OVERLOAD) else op if isinstance(op, _PACKET) else None
    )
