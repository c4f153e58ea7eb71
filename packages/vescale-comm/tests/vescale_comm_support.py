"""The table of what works: op, reduction, order, even or not, dtype, on each backend.

Run as a script, it writes SUPPORT.md; a test computes it again and compares. Under torchrun with
--nccl, on a machine with three GPUs, it prints each row and dtype that NCCL gets wrong.
"""

import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import vescale_comm
from vescale_comm import CommArgumentError, Emulator, simulate
from vescale_comm.testing import run
from vescale_comm_dense import DTYPES

FILE = Path(__file__).parent.parent / "SUPPORT.md"
MEMBERS = 3
REDUCTIONS = ["sum", "avg", "max", "min", "prod", "band", "bor", "bxor"]
ORDERS = ["native", "rank", "tree"]
EVEN, UNEVEN = [2, 2, 2], [0, 1, 5]


def rows():
    """Name, reduction, order and sizes of each row."""
    for op in REDUCTIONS:
        for order in ORDERS:
            yield "all_reduce", op, order, EVEN
    for op in REDUCTIONS:
        for order in ORDERS:
            for sizes in (EVEN, UNEVEN):
                yield "reduce_scatter", op, order, sizes
    for wire in vescale_comm.WIRES:
        yield "all_reduce", f"sum as {wire}", "rank", EVEN
        for sizes in (EVEN, UNEVEN):
            yield "reduce_scatter", f"sum as {wire}", "rank", sizes
    for op in REDUCTIONS:
        yield "all_reduce_bucketed", op, "native", EVEN
    for name in ("all_gather", "gather_pieces", "all_to_all", "scatter"):
        for sizes in (EVEN, UNEVEN):
            yield name, "", "", sizes
    for name in ("broadcast", "permute", "send and recv"):
        yield name, "", "", EVEN


def options(name, op, order, sizes):
    op, _, wire = op.partition(" as ")
    found = {"op": op, "order": order} if op else {}
    found |= {"wire": wire} if wire else {}
    found |= {"sizes": sizes} if name in ("reduce_scatter", "all_gather", "scatter") else {}
    return found | ({"pairs": [(0, 1), (1, 2)]} if name == "permute" else {})


def inputs(name, sizes, dtype):
    """Small whole numbers: every order of a native sum gives the same."""
    generator = torch.Generator().manual_seed(0)

    def values(numel):
        whole = torch.randint(0, 3, (numel, 2), generator=generator)
        return whole.to(torch.float32).to(dtype)

    if name == "all_to_all":
        return [[values(2 * size) for size in sizes] for _ in range(MEMBERS)]
    each = sizes if name in ("all_gather", "gather_pieces") else [sum(sizes)] * MEMBERS
    return [values(2 * size).view(size, 2, 2)[..., 0] for size in each]


def works(rank, world_size, device="cpu"):
    """For each row and dtype: whether it has the bits of the Emulator; None where it is refused."""
    return [[_case(rank, row, dtype, device) for dtype in DTYPES] for row in rows()]


def _case(rank, row, dtype, device):
    name, how, xs = row[0], options(*row), inputs(row[0], row[3], dtype)
    try:
        found, expected = _ours(name, rank, xs, how, device), _emulated(name, rank, xs, how)
    except CommArgumentError:
        return None
    return found.shape == expected.shape and torch.equal(_bits(found.cpu()), _bits(expected))


def _ours(name, rank, xs, how, device):
    call, x = getattr(vescale_comm, name, None), xs[rank]
    if name == "all_to_all":
        shapes = [tuple(pieces[rank].shape) for pieces in xs]
        return torch.cat(call([piece.to(device) for piece in x], shapes=shapes))
    x = x.to(device)
    if name == "gather_pieces":
        return torch.cat(call(x, shapes=[tuple(each.shape) for each in xs]))
    if name == "all_reduce_bucketed":
        return torch.cat([each.view(-1) for each in call([x, x[:1]], **how)])
    if name == "send and recv":
        return _passed_on(rank, x)
    return call(x, **how)


def _passed_on(rank, x):
    """From each member to the next, and nothing to the first."""
    if rank + 1 < MEMBERS:
        vescale_comm.send(x, target=rank + 1)
    return vescale_comm.recv(x, source=rank - 1) if rank else torch.zeros_like(x)


def _emulated(name, rank, xs, how):
    emulator = Emulator(MEMBERS)
    if name in ("all_to_all", "gather_pieces"):
        how = {"shapes": [tuple(x.shape) for x in xs]} if name == "gather_pieces" else {}
        return torch.cat(getattr(emulator, name)(xs, **how)[rank])
    if name == "all_reduce_bucketed":
        parts = [emulator.all_reduce(each, **how)[rank] for each in (xs, [x[:1] for x in xs])]
        return torch.cat([part.view(-1) for part in parts])
    if name == "send and recv":
        return emulator.permute(xs, pairs=[(m, m + 1) for m in range(MEMBERS - 1)])[rank]
    return getattr(emulator, name)(xs, **how)[rank]


def _bits(x):
    return x.contiguous().view(-1).view(torch.uint8)


def table():
    """The text of SUPPORT.md."""
    gloo, simulated = run(works, MEMBERS, timeout=120), simulate(MEMBERS).run(works)
    short = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    lines = [
        "# What works",
        "",
        "Written by `python tests/vescale_comm_support.py`, which runs every case on "
        f"{MEMBERS} ranks and compares",
        "bits with the `Emulator`; a test runs it again. **g**: on gloo, in processes. **s**: on "
        "`simulate`. **-**: refused with",
        "a named error, on every rank. `x`: wrong. Where sizes are uneven, one is 0.",
        "",
        "NCCL: not run, there was no machine with three GPUs. `torchrun --nproc-per-node=3 "
        "tests/vescale_comm_support.py --nccl`",
        "runs the same cases on it and prints what is wrong.",
        "",
        f"| op | reduction | order | sizes | {' | '.join(short)} |",
        f"|{'---|' * (4 + len(short))}",
    ]
    for index, (name, op, order, sizes) in enumerate(rows()):
        cells = [
            _cell([each[index][column] for each in (*gloo, *simulated)])
            for column in range(len(DTYPES))
        ]
        uneven = "uneven" if sizes is UNEVEN else "even"
        lines.append(f"| {name} | {op} | {order} | {uneven} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(found):
    if all(each is None for each in found):
        return "-"
    return "g s" if all(each is True for each in found) else "x"


def under_torchrun(backend, device):
    """What is wrong on this rank: rows, and the dtypes in which they differ from the Emulator."""
    dist.init_process_group(backend)
    rank = dist.get_rank()
    if device == "cuda":
        torch.cuda.set_device(rank)
    found = works(rank, MEMBERS, device)
    dist.destroy_process_group()
    return [
        (row, [str(dtype) for dtype, cell in zip(DTYPES, cells, strict=True) if cell is False])
        for row, cells in zip(rows(), found, strict=True)
        if False in cells
    ]


SCRIPTS = {
    "--nccl": partial(under_torchrun, "nccl", "cuda"),
    "--gloo": partial(under_torchrun, "gloo", "cpu"),
}

if __name__ == "__main__":
    if sys.argv[1:]:
        wrong = SCRIPTS[sys.argv[1]]()
        print(*wrong, f"{len(wrong)} rows are wrong", sep="\n")
        sys.exit(bool(wrong))
    FILE.write_text(table())
