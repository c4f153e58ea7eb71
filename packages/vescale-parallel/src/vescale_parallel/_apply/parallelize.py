"""`parallelize(model, mesh, plan)`: the same model object, distributed over a mesh."""

from collections.abc import Callable, Iterator
from typing import Any, Literal

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from vescale_dtensor import Placement, distribute_tensor
from vescale_dtensor.storage import set_gradient_reducer, sum_whole

from vescale_parallel._apply.attention_install import ForwardHooks, install_attention
from vescale_parallel._apply.boundaries import BatchHook, DistributeBatch, install_boundary
from vescale_parallel._apply.experts_install import install_experts, install_local_rows
from vescale_parallel._apply.gradients import (
    BUCKET_BYTES,
    BucketedReducer,
    reduce_before_steps,
)
from vescale_parallel._apply.local_batch import LocalBatch
from vescale_parallel._apply.optimizers import Distribute, optimizers_of, take_over
from vescale_parallel._apply.pipeline_install import (
    StagePlacements,
    capture_stages,
    install_stages,
    install_steps,
    of_stage,
    stage_placements,
)
from vescale_parallel._apply.preflight import preflight
from vescale_parallel._apply.replaced_parameters import retire
from vescale_parallel._apply.zero_install import StoredPlacements, install_zero, stored_placements
from vescale_parallel._check.gathers import install_gather_watch
from vescale_parallel._check.report import Report
from vescale_parallel._checkpoint.install import Budget, install_regions
from vescale_parallel._common.gradient_dtypes import keep_gradient_dtype
from vescale_parallel._common.interrupts import let_end
from vescale_parallel._common.mesh import mesh_sizes
from vescale_parallel._deferred.distributed import distributed
from vescale_parallel._deferred.models import attributes_of, materialize_rest
from vescale_parallel._deferred.recording import DeferredTensor
from vescale_parallel._invariant.meshes import compute_mesh
from vescale_parallel._invariant.step import InvariantStep
from vescale_parallel._notation.batch import TOKENS
from vescale_parallel._notation.rows import ParameterRow
from vescale_parallel._plan.data import device_memory
from vescale_parallel._plan.fields import as_zero
from vescale_parallel._plan.plan import Plan
from vescale_parallel._static.units import install_compile_entries, install_static
from vescale_parallel._step.distribute_batch import install_distribution
from vescale_parallel._step.forward_backward import install_step
from vescale_parallel._zero.host import HOST
from vescale_parallel._zero.recomputation import recomputation_of
from vescale_parallel._zero.schedule import zero_schedule_of


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Plan | None = None,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    static: bool = False,
    check: bool | Literal["sampled"] | None = "sampled",
    inputs: Any = None,
) -> nn.Module:
    """Distribute a model over a mesh, in place, and return it.

    Every rank passes the global model with the same values, as after `torch.manual_seed` with one
    seed. Parameters become distributed parameters (those that modules share stay shared), buffers
    stay plain and count as replicated, hooks redistribute activations to the plan's layouts, and
    the gradients of a backward are summed in buckets.

    A model that was built under `deferred()` gets its memory here, and each rank makes its own
    elements only, bitwise those that one device has. Of any other model the plain parameters are
    given back one after another: with the model there is one parameter more at a time.

    Parameters become other objects. Optimizers that exist already are given the new ones, and
    their state, if they have made steps, is distributed alike. Any other use of an old object
    raises `StaleParameterError`.

    Args:
        model: any module; nothing of it is edited.
        mesh: a named mesh over all ranks.
        plan: the rules; see `Plan`. None: `Plan.data_parallel`, which is right for every model.
        bucket_bytes: cap of a gradient bucket.
        static: whether forwards are recorded once and replayed without dispatch, with the results
            of eager mode bit for bit: of each unit of `zero`, or of the model; where that cannot be
            recorded, of its repeated blocks; in stages, of the blocks of each. What cannot be
            recorded, or is not faster when it is replayed, runs eagerly; `captured_units` says what
            does, and why.
        check: which replays of `static` (or `torch.compile`) are compared with the forward, run as
            well: outputs, and the gradients that backward gives. "sampled": of each unit calls 2,
            4, 8, ... 1,024, and then every 1,024th, one unit after the other; True: all; None:
            none. A difference is a `CaptureError` on every rank.
        inputs: for stages, what a call of the model is given: arguments by name, a tuple, or a
            tensor. It is called without values, and what lies around its blocks is placed in the
            order of use. None: its `dummy_inputs`; without those, the order of registration.

    Raises:
        PlanError: on every rank, before anything is changed: the plan does not fit, or the model is
            parallelised already, holds gradients, parameters without values, or hooks of
            parameters.
        DisagreementError: on every rank, before anything is changed: ranks pass another plan, mesh
            or model (names, shapes, values, train mode), or their random generators differ. It
            names what differs and on which ranks.
    """
    if plan is None:
        plan = Plan.data_parallel(model, mesh, memory=device_memory(mesh.device_type))
    # First of all: they are found by the parameter objects that are about to be replaced.
    optimizers = optimizers_of(model)
    options = {"bucket_bytes": bucket_bytes, "static": static, "check": check}
    report = preflight(model, mesh, plan, options, optimizers, inputs)
    where = _placements(mesh, report)
    _distribute_parameters(model, where, report, optimizers)
    here = of_stage(report, mesh)
    # Where a stage is one plain rank, activations are plain tensors, and no hook would find
    # anything.
    if not (isinstance(where, StagePlacements) and where.is_plain):
        _install_hooks(model, where.mesh, here, plan.batch_is)
        install_experts(model, here, where.mesh)
        install_local_rows(model, here, where.mesh)
    if isinstance(where, StoredPlacements):
        install_zero(model, report, where, as_zero(plan.zero).prefetch)
    within = install_attention(model, plan.sequence)
    scene = None
    if isinstance(where, StagePlacements):
        scene = install_stages(model, here, mesh, where, as_zero(plan.zero).prefetch)
    if scene is None:
        _install_whole_forwards(model, mesh, static, check)
    # Around what is captured: a recomputation then replays it, too.
    _install_checkpoint(model, where.mesh, here)
    if static and scene is not None:
        # And here within: of results that are kept, no program is replayed while they are noted.
        capture_stages(scene, check)
    install_steps(model, here, mesh, scene)
    _install_ends(model, within)
    set_gradient_reducer(list(model.parameters()), BucketedReducer(bucket_bytes), owned=True)
    reduce_before_steps()
    _install_invariant(model, mesh, where, report)
    return model


def _install_whole_forwards(
    model: nn.Module, mesh: DeviceMesh, static: bool, check: bool | str | None
) -> None:
    """Let forwards be captured, or found by `torch.compile`."""
    if static:
        install_static(model, mesh, check)
    else:
        install_compile_entries(model, mesh, check)


def _placements(mesh: DeviceMesh, report: Report) -> StoredPlacements | StagePlacements:
    """Return where parameters lie, and on which mesh activations are computed."""
    if report.split is not None:
        return stage_placements(mesh, report)
    invariant = report.invariant
    # Logical shards are computed one after another: no activation lies over the batch's axes.
    used = mesh if invariant is None else compute_mesh(mesh, invariant.axes)
    return stored_placements(mesh, report, used)


def _distribute_parameters(
    model: nn.Module,
    where: StoredPlacements | StagePlacements,
    report: Report,
    optimizers: list[Optimizer],
) -> None:
    """Replace every parameter by its distributed self, once for all modules that share it.

    One after another, and each plain one gives its memory back at once: with the model there is one
    parameter more at a time, and of a deferred model what this rank has of it.
    """
    rows = {name: row for row in report.parameters for name in row.names}
    made: dict[str, nn.Parameter] = {}
    replaced: dict[int, Tensor] = {}
    # Alive until all are replaced: an `id` names an object only so long.
    plain_ones: list[nn.Parameter] = []
    # A list: registering parameters while walking over them would change what is walked over.
    for module, name, full_name in list(_parameter_places(model)):
        row = rows[full_name]
        if row.name not in made:
            plain = module.get_parameter(name)
            distribute = _distribution(plain, *where.of(row), row)
            parameter = made[row.name] = _make(plain, distribute)
            # Before it is retired: state is looked up under it, and as large as it is.
            take_over(optimizers, {id(plain): (parameter, distribute)})
            replaced[id(plain)] = parameter
            plain_ones.append(plain)
            retire(plain, row.name)
        # By assignment, as users do it: a module that keeps parameters elsewhere too (an LSTM its
        # list of weights) learns of the new one that way, and not by `register_parameter`.
        setattr(module, name, made[row.name])
    materialize_rest(model, replaced)


def _distribution(
    plain: nn.Parameter, mesh: DeviceMesh, where: tuple[Placement, ...], row: ParameterRow
) -> Distribute:
    """Return how a parameter, and what an optimizer remembers of it, is distributed."""
    built = plain.dtype

    def distribute(tensor: Tensor) -> Tensor:
        # States of an optimizer that has made steps go along; those in a dtype of their own stay.
        dtype = row.dtype if tensor.dtype == built else tensor.dtype
        # A parameter in a flat buffer is row-major there, whatever strides it had before.
        row_major = row.zero > 0
        if isinstance(tensor, DeferredTensor):
            return distributed(tensor, mesh, where, dtype, row_major=row_major)
        given = tensor.detach()
        given = given.contiguous() if row_major else given
        # No source rank: that all ranks hold the same values has been checked, nothing is sent.
        return distribute_tensor(given.to(dtype), mesh, where, src_data_rank=None)

    # At once, and not when buffers are made: of all parameters the device would hold too much.
    device = HOST.type if row.offload else mesh.device_type
    return lambda tensor: distribute(tensor).to(device)


def _make(plain: nn.Parameter, distribute: Distribute) -> nn.Parameter:
    parameter = nn.Parameter(distribute(plain), requires_grad=plain.requires_grad)
    for attribute, value in attributes_of(plain).items():
        # What users hang on parameters (groups for weight decay, say) goes along.
        setattr(parameter, attribute, value)
    keep_gradient_dtype(parameter, plain)
    return parameter


def _parameter_places(model: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    """Yield every place of a parameter: its module, its name there, its full name."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, _ in module.named_parameters(recurse=False, remove_duplicate=False):
            yield module, name, f"{prefix}.{name}" if prefix else name


def _install_hooks(model: nn.Module, mesh: DeviceMesh, report: Report, batch_is: str) -> None:
    # The batch first: a rule about the root's inputs then sees distributed tensors.
    if report.batch is not None and report.invariant is None:
        distribute: BatchHook
        if batch_is == "local":
            distribute = LocalBatch(report.batch, mesh)
        else:
            distribute = DistributeBatch(report.batch, mesh, compares=report.split is None)
        model.register_forward_pre_hook(distribute, with_kwargs=True)
        install_distribution(model, distribute)
        if report.split is None:
            sizes = mesh_sizes(mesh)
            shared = [axis for axis, dim in report.batch.dims if dim is not None and axis != TOKENS]
            install_gather_watch(model, [axis for axis in shared if sizes.get(axis, 1) > 1])
    modules = dict(model.named_modules(remove_duplicate=False))
    for row in report.boundaries:
        install_boundary(modules[row.module], row, mesh)


def _install_checkpoint(model: nn.Module, mesh: DeviceMesh, report: Report) -> None:
    regions = install_regions(model, report.regions, mesh.device_type)
    for name, region in regions.items():
        region.before_again = recomputation_of(model, name)
    if report.budget is not None:
        # Of logical shards, each has all of its tokens on one rank.
        ranks = report.activations.sharers if report.invariant is not None else 1

        def needed(tokens: int) -> int:
            return report.activations.needed(tokens * ranks)

        budget = Budget(list(regions.values()), needed)
        model.register_forward_pre_hook(budget, with_kwargs=True)


def _install_ends(model: nn.Module, within: ForwardHooks | None) -> None:
    """Around all that forwards are by now: let what they have begun be ended by an interrupt."""
    schedule = zero_schedule_of(model)
    ends: dict[str, list[Callable[[], None]]] = {}
    if schedule is not None:
        ends = {name: [end] for name, end in schedule.ends().items()}
    own = {} if within is None else within.ends(model)
    for name, end in own.items():
        ends.setdefault(name, []).append(end)
    for name, calls in ends.items():
        let_end(model.get_submodule(name), calls)


def _install_invariant(
    model: nn.Module, mesh: DeviceMesh, where: StoredPlacements | StagePlacements, report: Report
) -> None:
    invariant = report.invariant
    if invariant is None:
        return
    schedule = zero_schedule_of(model)
    if isinstance(where, StoredPlacements) and report.buffers:
        # Norms that anybody takes of stored gradients, as torch's clipping and Adafactor do.
        sum_whole(where.stored, invariant.axes)
    install_step(model, InvariantStep(model, invariant, mesh, schedule, report.over))
