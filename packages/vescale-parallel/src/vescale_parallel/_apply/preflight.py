"""Checks everything that `parallelize` needs before it changes a model, on all ranks.

A rank that found a problem does not raise at once: the others would wait for it in the comparison
for ever. It takes part in the comparison, and then all ranks raise.
"""

import zlib
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from vescale_comm.agreement import gather_numbers, named, several_ranks
from vescale_dtensor import DTensor

from vescale_parallel._apply.experts_trial import why_not_apart
from vescale_parallel._apply.facts import ADVICE, Given, facts_of, mesh_facts
from vescale_parallel._apply.gradients import BucketedReducer
from vescale_parallel._check.report import Report
from vescale_parallel._common.agreement import ranks_that_hold, require_same, world_ranks
from vescale_parallel._common.mesh import mesh_ranks
from vescale_parallel._common.messages import listed
from vescale_parallel._common.torch_compat import hooks_of
from vescale_parallel._deferred.recording import DeferredTensor
from vescale_parallel._errors import DisagreementError, PlanError
from vescale_parallel._experts.kinds import is_known
from vescale_parallel._experts.moe import Experts
from vescale_parallel._experts.resolve import ExpertsRow
from vescale_parallel._invariant.resolve import BATCH_NORMS
from vescale_parallel._plan.plan import Plan
from vescale_parallel._zero import host

_HEAD = "parallelize was not given the same on all ranks, and has changed nothing:"


def preflight(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Plan,
    options: dict[str, Any],
    optimizers: list[Optimizer],
    inputs: Any = None,
) -> Report:
    """Return the plan resolved, if all ranks pass the same and it can be done; changes nothing.

    `options`: the other arguments of `parallelize`, by name, but for `inputs`: what follows from
    these is compared.

    Raises:
        PlanError: on every rank: the plan does not fit, or the model cannot be distributed.
        DisagreementError: on every rank: what differs, and on which ranks.
    """
    report, problem = None, None
    try:
        BucketedReducer(options["bucket_bytes"])  # for its check only
        # Before the plan is resolved, which reads shapes that lazy parameters do not have.
        _require_plain(model)
        report = plan.check(model, mesh, inputs=inputs)
        if plan.deterministic is not None and options.get("static"):
            _require_no_statistics(model)
        _require_fresh(model, mesh, on_host=any(row.offload for row in report.parameters))
        _require_apart(model, report.experts)
    except Exception as error:  # whatever it is, the other ranks must hear of it before it leaves
        problem = error
    if report is not None and report.split is not None:
        # A file or a function of the user's: each rank has read or called its own.
        found = {
            "actions of the pipeline's schedule": report.split.schedule.to_csv(),
            "stages of the pipeline": repr((report.split.stages, [*report.split.owners.items()])),
        }
        digests = {name: zlib.crc32(one.encode()) for name, one in found.items()}
        options = options | {name: f"digest {one:08x}" for name, one in digests.items()}
    # The mesh first: it says which ranks the rest is compared among.
    _require_same_mesh(mesh)
    given = Given(model, mesh, plan, options, optimizers, problem)
    # The ranks of one mesh hold one model; several meshes side by side may hold several.
    peers = mesh_ranks(mesh) if isinstance(mesh, DeviceMesh) else world_ranks()
    require_same(facts_of(given), peers=peers, head=_HEAD, advice=ADVICE)
    # The same on all ranks, or the comparison would have raised: each can use its own words.
    if problem is not None:
        raise problem
    assert report is not None
    return report


def _require_same_mesh(mesh: object) -> None:
    """Every rank passes a mesh that it is part of, and that exactly the ranks of it pass."""
    if not several_ranks():
        return
    said = mesh_facts(mesh)
    passed_by = ranks_that_hold(said)
    # Ranks of one mesh can still be in order while those of another are not: all have to know.
    fits = isinstance(mesh, DeviceMesh) and passed_by == sorted(mesh_ranks(mesh))
    if all(flag for (flag,) in gather_numbers([fits])):
        return
    require_same({"mesh": said}, peers=world_ranks(), head=_HEAD, advice=ADVICE)
    raise DisagreementError(
        f"{_HEAD}\n  - mesh: {said['mesh']} is passed by {named(passed_by)}\n{ADVICE['mesh']}"
    )


def _require_no_statistics(model: nn.Module) -> None:
    """Refuse batch norms whose running statistics a step over logical shards would have to see.

    In eval mode, too: it may change, and a replay would leave them as they are.
    """
    found = [
        name
        for name, one in model.named_modules()
        if isinstance(one, BATCH_NORMS) and one.track_running_stats
    ]
    if found:
        raise PlanError(
            f"static=True with deterministic='dp-invariant': batch norms {listed(found)} keep "
            "running statistics, and a replay does not tell what they find in a logical shard. "
            "Leave static=True out, or use norms without running statistics."
        )


def _require_plain(model: nn.Module) -> None:
    """Refuse parameters that are more than a tensor: lazy, distributed, computing by themselves."""
    parameters = dict(model.named_parameters())
    done = [name for name, p in parameters.items() if isinstance(p, DTensor)]
    if done:
        raise PlanError(
            f"{type(model).__name__} is parallelised already ({listed(done, 3)} are distributed). "
            "Call parallelize once, on the plain model."
        )
    lazy = [name for name, p in parameters.items() if is_lazy(p)]
    if lazy:
        raise PlanError(
            f"parameters without a shape cannot be distributed: {listed(lazy)} are lazy. Run the "
            "model once before parallelize."
        )
    # Quantized weights and the like override what torch functions do with them; a slice of their
    # storage would not be a slice of the tensor that they stand for.
    known = (nn.Parameter.__torch_function__, DeferredTensor.__torch_function__)
    special = {n: p for n, p in parameters.items() if type(p).__torch_function__ not in known}
    if special:
        kinds = dict.fromkeys(type(p).__name__ for p in special.values())
        raise PlanError(
            f"parameters of type {listed(kinds)} compute by themselves and cannot be distributed: "
            f"{listed(special)}. Parallelize the model with plain parameters."
        )


def _require_apart(model: nn.Module, rows: Sequence[ExpertsRow]) -> None:
    """Refuse modules that the plan calls experts, and that compute something else in parts."""
    found = []
    for row in rows:
        module = model.get_submodule(row.module)
        # Those that say by themselves what they are keep to it.
        if row.axes and not (isinstance(module, Experts) or is_known(module)):
            why = why_not_apart(module, row.kind, row.counts)
            if why is not None:
                found.append(f"  - '{row.module}', a {type(module).__name__}: {why}.")
    if found:
        raise PlanError("\n".join(["experts that ranks cannot share:", *found]))


def _require_fresh(model: nn.Module, mesh: DeviceMesh, *, on_host: bool) -> None:
    """Refuse models whose tensors have no values here, and what would be left behind.

    `on_host`: something is offloaded, so that the model may be on the host.
    """
    parameters = dict(model.named_parameters())
    tensors = parameters | dict(model.named_buffers())
    empty = [name for name, tensor in tensors.items() if tensor.device.type == "meta"]
    if empty:
        raise PlanError(
            f"tensors without values cannot be distributed: {listed(empty)} are on the meta "
            "device. Build the model under vescale_parallel.deferred() in place of "
            "torch.device('meta'): it takes no memory either, and each rank makes the values that "
            "it stores (load_pretrained reads only those). Or build it on a real device; what "
            "to_empty() leaves has no values."
        )
    # On the device there may be no room for all of a model that is offloaded.
    known = (mesh.device_type, host.HOST.type) if on_host else (mesh.device_type,)
    elsewhere = [name for name, p in parameters.items() if p.device.type not in known]
    if elsewhere:
        raise PlanError(
            f"the mesh is of {mesh.device_type} devices, and {listed(elsewhere)} are elsewhere. "
            f"Call model.to('{mesh.device_type}') first."
        )
    # Dropping them would lose a step; distributing them would need to know how they were summed.
    with_gradient = [name for name, p in parameters.items() if p.grad is not None]
    if with_gradient:
        raise PlanError(
            f"parameters hold gradients of a plain backward: {listed(with_gradient)}. Call "
            "model.zero_grad() before parallelize."
        )
    hooked = {name: hooks_of(p) for name, p in parameters.items() if hooks_of(p)}
    if hooked:
        methods = dict.fromkeys(method for of_one in hooked.values() for method in of_one)
        raise PlanError(
            f"parameters have hooks ({', '.join(methods)}), which would stay behind on the plain "
            f"tensors: {listed(hooked)}. Register them after parallelize, on model.parameters()."
        )
