"""`parallelize(model, mesh, plan)`: the same model object, distributed over a mesh."""

from collections.abc import Iterator

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from vescale_dtensor import distribute_tensor, set_gradient_reducer

from vescale_parallel._boundaries import DistributeBatch, install_boundary
from vescale_parallel._gradients import BUCKET_BYTES, BucketedReducer
from vescale_parallel._placements import placements
from vescale_parallel._plan import Plan
from vescale_parallel._preflight import preflight
from vescale_parallel._report import Report


def parallelize(
    model: nn.Module, mesh: DeviceMesh, plan: Plan, *, bucket_bytes: int = BUCKET_BYTES
) -> nn.Module:
    """Distribute a model over a mesh, in place, and return it.

    Every rank passes the whole model with the same values, as after `torch.manual_seed` with one
    seed. Parameters become distributed parameters (those that modules share stay shared), buffers
    stay plain and count as replicated, hooks redistribute activations to the plan's layouts, and
    the gradients of a backward are summed in buckets. Make optimizers afterwards: they hold
    parameter objects.

    Args:
        model: any module; nothing of it is edited.
        mesh: a named mesh over all ranks.
        plan: the rules; see `Plan`.
        bucket_bytes: cap of a gradient bucket.

    Raises:
        PlanError: on every rank, before anything is changed: the plan does not fit, or the model is
            parallelised already, holds gradients, or parameters without values.
        DisagreementError: on every rank, before anything is changed: ranks pass another plan, mesh
            or model (names, shapes, values, train mode), or their random generators differ. It
            names what differs and on which ranks.
    """
    report = preflight(model, mesh, plan, bucket_bytes)
    _distribute_parameters(model, mesh, report)
    _install_hooks(model, mesh, report)
    set_gradient_reducer(list(model.parameters()), BucketedReducer(bucket_bytes))
    return model


def _distribute_parameters(model: nn.Module, mesh: DeviceMesh, report: Report) -> None:
    """Replace every parameter by its distributed self, once for all modules that share it."""
    rows = {name: row for row in report.parameters for name in row.names}
    made: dict[str, nn.Parameter] = {}
    # A list: registering parameters while walking over them would change what is walked over.
    for module, name, full_name in list(_parameter_places(model)):
        row = rows[full_name]
        plain = module.get_parameter(name)
        if row.name not in made:
            where = placements(row.layout, mesh, plain.ndim)
            # No source rank: that all ranks hold the same values has been checked, nothing is sent.
            shard = distribute_tensor(plain.detach(), mesh, where, src_data_rank=None)
            made[row.name] = nn.Parameter(shard, requires_grad=plain.requires_grad)
            for attribute, value in vars(plain).items():
                # What users hang on parameters (groups for weight decay, say) goes along.
                setattr(made[row.name], attribute, value)
        module.register_parameter(name, made[row.name])


def _parameter_places(model: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    """Every place that holds a parameter: its module, its name there, its full name."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, _ in module.named_parameters(recurse=False, remove_duplicate=False):
            yield module, name, f"{prefix}.{name}" if prefix else name


def _install_hooks(model: nn.Module, mesh: DeviceMesh, report: Report) -> None:
    # The batch first: a rule about the root's inputs then sees distributed tensors.
    if report.batch is not None:
        model.register_forward_pre_hook(DistributeBatch(report.batch, mesh), with_kwargs=True)
    modules = dict(model.named_modules(remove_duplicate=False))
    for row in report.boundaries:
        install_boundary(modules[row.module], row, mesh)
