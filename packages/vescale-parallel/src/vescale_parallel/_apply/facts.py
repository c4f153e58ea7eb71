"""Describes the arguments of `parallelize` so that ranks can compare them.

Nothing here raises or communicates: a rank whose model cannot be described says that instead, and
still comes to the comparison in which the others wait.
"""

import dataclasses
import hashlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from vescale_comm.agreement import UNDESCRIBED, named
from vescale_dtensor import DTensor

from vescale_parallel._apply.attributes import attributes
from vescale_parallel._apply.optimizers import state_facts
from vescale_parallel._common.checksums import checksum
from vescale_parallel._common.gradient_dtypes import gradient_dtype
from vescale_parallel._common.mesh import mesh_ranks
from vescale_parallel._deferred.recording import DeferredTensor, value_of
from vescale_parallel._deferred.value_digest import digest_of

ADVICE: Final = {
    "mesh": "Every rank of a mesh passes that mesh, as mesh(dp=..., tp=...) makes it.",
    "plan": "Pass the same plan on every rank.",
    "option": "Pass the same options on every rank.",
    "module": "Build the same model in the same mode (train or eval) on every rank.",
    "attribute": "Build the same model on every rank. What belongs to one rank is not compared "
    "where the name of the attribute begins with an underscore, or has a part such as 'rank' or "
    "'device'.",
    "parameter": "Build the same model on every rank.",
    "buffer": "Build the same model on every rank.",
    "value of": "Call torch.manual_seed with the same seed on every rank before the model is "
    "built, or load the same weights everywhere; what to_empty() leaves differs from rank to rank "
    "(build under deferred() in place of the meta device).",
    "state of": "Load the same state into the optimizers of all ranks, or make them afterwards.",
    "random state of": "Call torch.manual_seed with the same seed on every rank, and draw the same "
    "numbers on every rank: dropout and initialisation go on from there.",
}
"""What to do where ranks differ, by section."""


def mesh_facts(mesh: Any) -> dict[str, str]:
    """Axes, sizes, ranks and device type of a mesh, or what was passed instead of one."""
    if not isinstance(mesh, DeviceMesh):
        return {"mesh": f"a {type(mesh).__name__}"}
    names = mesh.mesh_dim_names or [f"axis {position}" for position in range(mesh.ndim)]
    ranks = mesh_ranks(mesh)
    sizes = ", ".join(f"{name}={size}" for name, size in zip(names, mesh.shape, strict=True))
    # The order of the ranks matters too, and a list of thousands is no message: its checksum is.
    order = "" if ranks == sorted(ranks) else f", order {zlib.crc32(repr(ranks).encode()):08x}"
    return {"mesh": f"{sizes} over {named(sorted(ranks))}{order} ({mesh.device_type})"}


@dataclasses.dataclass(frozen=True)
class Given:
    """What one rank passes to `parallelize`; anything at all, as the caller may be wrong.

    Attributes:
        model: the module.
        mesh: the mesh.
        plan: the plan.
        options: the other arguments, by name.
        optimizers: those that hold parameters of the model already.
    """

    model: Any
    mesh: Any
    plan: Any
    options: dict[str, object]
    optimizers: list[Optimizer]


def facts_of(given: Given) -> dict[str, dict[str, str]]:
    """Everything that must be the same on all ranks of a mesh, section by section."""
    model = given.model
    return {
        "plan": _described(lambda: _plan(given.plan)),
        "option": {name: repr(value) for name, value in given.options.items()},
        "module": _described(lambda: dict(_modules(model))),
        "parameter": _described(lambda: dict(_parameters(model))),
        "buffer": _described(lambda: {n: _tensor(b) for n, b in model.named_buffers()}),
        "attribute": _described(lambda: dict(attributes(model))),
        "value of": _described(lambda: dict(_values(model))),
        "state of": _described(lambda: dict(state_facts(given.optimizers, model))),
        "random state of": _described(lambda: dict(_random_states(given.mesh))),
    }


def _described(describe: Callable[[], dict[str, str]]) -> dict[str, str]:
    try:
        return describe()
    except Exception as error:
        return {UNDESCRIBED: f"{type(error).__name__}: {error}"}


def _plan(plan: Any, within: str = "") -> dict[str, str]:
    facts: dict[str, str] = {}
    for field in dataclasses.fields(plan):
        name, value = within + field.name, getattr(plan, field.name)
        if dataclasses.is_dataclass(value):
            facts |= _plan(value, f"{name}.")
        elif isinstance(value, dict):
            # The order counts: the first rule that matches wins.
            for position, (glob, layout) in enumerate(value.items(), 1):
                facts[f"{name} {glob}"] = f"{layout!r} (rule {position})"
        else:
            # A function prints its address, which differs between processes; what is called as
            # one (`functools.partial`) prints that of a function within.
            own = value if hasattr(value, "__qualname__") else type(value)
            facts[name] = own.__qualname__ if callable(value) else repr(value)
    return facts


def _modules(model: nn.Module) -> Iterator[tuple[str, str]]:
    for name, module in model.named_modules(remove_duplicate=False):
        # What it computes with (sizes, eps, p) is among its attributes.
        mode = "training" if module.training else "evaluating"
        yield name or "(the model)", f"{type(module).__qualname__} {mode}"


def _parameters(model: nn.Module) -> Iterator[tuple[str, str]]:
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = first.setdefault(id(parameter), name)
        # Where parameters are shared decides how many of them there are.
        shared = "" if owner == name else f", shared with '{owner}'"
        frozen = "" if parameter.requires_grad else ", frozen"
        yield name, _tensor(parameter) + _kept(parameter) + frozen + shared


def _kept(parameter: nn.Parameter) -> str:
    # Ranks that kept gradients in different dtypes would send each other different bytes.
    dtype = gradient_dtype(parameter)
    return "" if dtype is parameter.dtype else f", gradient {dtype}"


def _tensor(tensor: Tensor) -> str:
    if isinstance(tensor, DTensor):
        return repr(tensor)
    # Strides too: an operator that keeps them would draw dropout masks in another order.
    strides = "" if tensor.is_contiguous() else f", strides {tuple(tensor.stride())}"
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device.type}{strides}"


def _values(model: nn.Module) -> Iterator[tuple[str, str]]:
    for tensors in (model.named_parameters(), model.named_buffers()):
        for name, tensor in tensors:
            if isinstance(tensor, DeferredTensor):
                # Nothing is computed: what would be is compared.
                yield name, f"made by {digest_of(value_of(tensor))}"
            elif not isinstance(tensor, DTensor) and tensor.device.type != "meta":
                yield name, f"checksum {checksum(tensor):08x}"


def _random_states(mesh: DeviceMesh) -> Iterator[tuple[str, str]]:
    yield "cpu", _state(torch.get_rng_state())
    if mesh.device_type == "cuda":
        yield "cuda", _state(torch.cuda.get_rng_state())


def _state(state: Tensor) -> str:
    return f"digest {hashlib.sha256(state.numpy().tobytes()).hexdigest()[:16]}"
