"""What of torch runs unmodified in `simulate`, and gives the bits of real processes: a table.

Run as a script, it computes the column of the installed torch (or the rows that its argument names)
and writes it into UNMODIFIED.md; a test computes it again and compares.
"""

import re
import sys
import tempfile
import warnings
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import nn as dist_nn  # here: its functions keep the default group of now
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from vescale_comm import simulate
from vescale_comm.testing import outcomes

FILE = Path(__file__).parent.parent / "UNMODIFIED.md"
RANKS = 4
STEPS = 2


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def trained(wrapped, rank):
    """Losses and parameters of a few steps on this rank's own batches."""
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = wrapped(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [whole(one) for one in losses], [whole(p).detach() for p in wrapped.parameters()]


def fsdp2(rank, world_size):
    """FSDP2 (`fully_shard`)"""
    built, mesh = model(), init_device_mesh("cpu", (world_size,))
    for layer in (built[0], built[2], built):
        fully_shard(layer, mesh=mesh)
    return trained(built, rank)


def hsdp(rank, world_size):
    """FSDP2 on a mesh of two axes (HSDP)"""
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    return trained(fully_shard(model(), mesh=mesh), rank)


def fsdp1(rank, world_size):
    """FSDP1 (`FullyShardedDataParallel`)"""
    from torch.distributed.fsdp import FullyShardedDataParallel

    built = FullyShardedDataParallel(model(), device_id=torch.device("cpu"))
    return trained(built, rank)[0]


def ddp(rank, world_size):
    """`DistributedDataParallel`"""
    from torch.nn.parallel import DistributedDataParallel

    return trained(DistributedDataParallel(model()), rank)


def tensor_parallel(rank, world_size):
    """`parallelize_module` (DTensor, tensor parallel)"""
    mesh = init_device_mesh("cpu", (world_size,))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return trained(parallelize_module(model(), mesh, plan), 0)


def fsdp2_and_tp(rank, world_size):
    """FSDP2 and tensor parallel on one mesh"""
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("dp", "tp"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    built = parallelize_module(model(), mesh["tp"], plan)
    return trained(fully_shard(built, mesh=mesh["dp"]), rank // 2)


def redistribute(rank, world_size):
    """`distribute_tensor`, `redistribute`, ops of DTensors"""
    mesh = init_device_mesh("cpu", (2, world_size // 2))
    x = distribute_tensor(torch.arange(35.0).view(7, 5), mesh, [Shard(0), Shard(1)])
    y = (x @ x.T).redistribute(mesh, [Replicate(), Shard(1)])
    return y.to_local(), y.sum().full_tensor()


def pipeline(schedule):
    def program(rank, world_size):
        from torch.distributed import pipelining

        found = getattr(pipelining, schedule)
        several = schedule in ("ScheduleInterleaved1F1B", "ScheduleLoopedBFS")
        numbers = [rank, rank + world_size] if several else [rank]
        torch.manual_seed(0)
        layers = [nn.Linear(8, 8) for _ in range(world_size * len(numbers))]
        stages = [
            pipelining.PipelineStage(layers[n], n, len(layers), torch.device("cpu"))
            for n in numbers
        ]
        batch, target = torch.ones(8, 8), torch.zeros(8, 8)
        losses = []
        runner = found(
            stages if several else stages[0], n_microbatches=8, loss_fn=nn.functional.mse_loss
        )
        given = {"target": target, "losses": losses} if rank == world_size - 1 else {}
        runner.step(*((batch,) if rank == 0 else ()), **given)
        return losses, [layers[n].weight.grad for n in numbers]

    program.__doc__ = f"`pipelining.{schedule}`"
    return program


gpipe = pipeline("ScheduleGPipe")
one_f_one_b = pipeline("Schedule1F1B")
interleaved = pipeline("ScheduleInterleaved1F1B")


def checkpoint(rank, world_size):
    """`checkpoint.save`, `load` (DCP), of DTensors"""
    import torch.distributed.checkpoint as dcp

    where = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(where)
    mesh = init_device_mesh("cpu", (world_size,))
    x = distribute_tensor(torch.arange(35.0).view(7, 5), mesh, [Shard(0)])
    dcp.save({"x": x}, checkpoint_id=where[0])
    y = distribute_tensor(torch.zeros(7, 5), mesh, [Shard(1)])
    dcp.load({"x": y}, checkpoint_id=where[0])
    return y.to_local()


def zero_optimizer(rank, world_size):
    """`ZeroRedundancyOptimizer`"""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    built = model()
    optimizer = ZeroRedundancyOptimizer(built.parameters(), torch.optim.AdamW, lr=0.1)
    built(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return [p.detach() for p in built.parameters()]


def objects(rank, world_size):
    """`all_gather_object`, `broadcast_object_list`, `scatter_object_list`, `gather_object`"""
    everyone, scattered = [None] * world_size, [None]
    dist.all_gather_object(everyone, {"rank": rank})
    sent = [rank]
    dist.broadcast_object_list(sent, 1)
    dist.scatter_object_list(scattered, list(range(world_size)) if rank == 0 else None, 0)
    gathered = [None] * world_size if rank == 0 else None
    dist.gather_object(rank, gathered, 0)
    return everyone, sent, scattered, gathered


def messages(rank, world_size):
    """`send`, `recv`, `isend`, `irecv`, `batch_isend_irecv`"""
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    x, y, z = torch.full((3,), float(rank)), torch.zeros(3), torch.zeros(3)
    ops = [dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, y, before)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    if rank == 0:
        dist.send(x, 1)
    if rank == 1:
        dist.recv(z, 0)
    return y, z


def functional(rank, world_size):
    """Functional collectives, with gradients"""
    x = torch.full((4,), rank + 1.0, requires_grad=True)
    y = dist_nn.functional.all_reduce(x * 2)
    z = torch.cat(dist_nn.functional.all_gather(x))
    (y.sum() + z.square().sum()).backward()
    return y.detach(), z.detach(), x.grad


def subgroups(rank, world_size):
    """`new_group`, `new_subgroups`, `barrier`"""
    evens = dist.new_group([0, 2])
    mine, _ = dist.new_subgroups(2)
    x, y = torch.tensor(rank), torch.tensor(rank)
    if rank in (0, 2):
        dist.all_reduce(x, group=evens)
    dist.all_reduce(y, group=mine)
    dist.barrier()
    return x, y


def monitored(rank, world_size):
    """`monitored_barrier` (gloo's own)"""
    dist.monitored_barrier()


def loss_in_parallel(rank, world_size):
    """Loss parallel (`loss_parallel`)"""
    with loss_parallel():
        return loss_of(world_size)


def loss_of(world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    logits = distribute_tensor(torch.arange(32.0).view(4, 8).sin(), mesh, [Shard(1)])
    logits.requires_grad_()
    loss = nn.functional.cross_entropy(logits, torch.arange(4))
    loss.backward()
    return whole(loss).detach(), logits.grad.to_local()


def loss_around(rank, world_size):
    """`loss_parallel`, entered around `simulate(...).run(...)`"""
    return loss_of(world_size)


PROGRAMS = (
    fsdp2, hsdp, fsdp1, ddp, tensor_parallel, fsdp2_and_tp, redistribute, loss_in_parallel,
    loss_around, gpipe, one_f_one_b, interleaved, checkpoint, zero_optimizer, objects, messages,
    functional, subgroups, monitored,
)  # fmt: skip


def equal(a, b):
    if isinstance(a, torch.Tensor):
        # Not the bits: over four ranks gloo adds floats in another order.
        return a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=1e-7)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def around(number):
    """What is entered around a program: torch's own context where that is what is tried."""
    return loss_parallel() if PROGRAMS[number] is loss_around else nullcontext()


def in_process(rank, world_size, number):
    warnings.simplefilter("ignore")
    with around(number):
        return PROGRAMS[number](rank, world_size)


def cell(number):
    """ "yes", or the kind of error that simulate gives; "no" where torch itself cannot."""
    real = outcomes(in_process, RANKS, number)
    if not all(hasattr(one, "value") for one in real):
        print(PROGRAMS[number].__doc__, "in processes:", real[0], file=sys.stderr)
        return "-"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with around(number):
                found = simulate(RANKS).run(PROGRAMS[number])
    except Exception as error:
        cause = error.__cause__ or error
        print(PROGRAMS[number].__doc__, "simulated:", repr(cause), file=sys.stderr)
        return f"no: {type(cause).__name__}"
    return "yes" if equal(found, [one.value for one in real]) else "WRONG"


def version():
    return ".".join(torch.__version__.split(".")[:2])


def column(only=""):
    named = enumerate(PROGRAMS)
    return {program.__doc__: cell(n) for n, program in named if only in program.__name__}


def read():
    """The columns that are written down, by version."""
    rows = [
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in FILE.read_text().splitlines()
        if line.startswith("|") and not re.match(r"^\|( -+ \||---)", line)
    ]
    versions = rows[0][1:]
    return {v: {row[0]: row[i + 1] for row in rows[1:]} for i, v in enumerate(versions)}


def table(columns):
    versions = sorted(columns, key=lambda v: [int(n) for n in v.split(".")])
    lines = ["| | " + " | ".join(versions) + " |", "|---" * (len(versions) + 1) + "|"]
    for program in PROGRAMS:
        cells = [columns[v].get(program.__doc__, "") for v in versions]
        lines.append(f"| {program.__doc__} | " + " | ".join(cells) + " |")
    # What stands before the table on the page stays there.
    return "\n".join([FILE.read_text().partition("\n|")[0], *lines, ""])


if __name__ == "__main__":
    sys.stdout.write(version() + "\n")
    known = read()
    known[version()] = {**known.get(version(), {}), **column(*sys.argv[1:])}
    FILE.write_text(table(known))
