"""`from_local`: all ranks believe in one tensor, or all of them raise.

Uneven shards without `shape=` find their global shape; whatever ranks pass differently is an error
on every rank; and whether anything is exchanged follows from what is the same on all of them.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as stock
import vescale_dtensor as vd
from vescale_comm import simulate
from vescale_comm.testing import device_mesh, on_ranks, run
from vescale_dtensor import DisagreementError, LayoutError, Partial, RaggedShard, Replicate, Shard
from vescale_dtensor._autograd.local_agreement import silent

from_local = vd.DTensor.from_local


def _extent(extent, count, index):
    size = -(-extent // count)
    return max(0, min(size, extent - index * size))


def _one_axis(rank, world_size, extent, dim):
    mesh, whole = device_mesh((world_size,)), torch.arange(extent * 2.0).reshape(extent, 2)
    whole = whole if dim == 0 else whole.t().contiguous()
    for _ in range(3):
        size = _extent(extent, world_size, rank)
        part = whole.narrow(dim, min(extent, rank * -(-extent // world_size)), size)
        made = from_local(part, mesh, [Shard(dim)])
        assert made.shape == whole.shape
        assert torch.equal(made.full_tensor(), whole)
        assert made.sum().item() == whole.sum().item()


@pytest.mark.parametrize("extent", [0, 1, 3, 4, 5, 9, 12])
@pytest.mark.parametrize("dim", [0, 1])
def test_uneven_and_empty_shards_find_their_shape(extent, dim):
    simulate(4)(_one_axis, extent, dim)


@on_ranks(2, simulated=True)
def test_calls_that_nothing_is_compared_in_any_more_have_their_own_shapes(rank, world_size):
    mesh = device_mesh((world_size,))
    for shape in [(2, 3)] * 4 + [(3, 3), (2, 3), (3, 2)]:  # the first two of a kind are compared
        for local in (torch.ones(shape), torch.ones(shape[::-1]).t()):
            made = from_local(local, mesh, [Replicate()])
            assert (made.shape, made.stride()) == (local.shape, local.stride())


WHOLE_SHAPES = [
    ([Shard(0), Shard(1)], (3, 5)),
    ([Shard(0), Shard(0)], (7, 2)),
    ([Shard(1), Replicate()], (2, 3)),
    ([Replicate(), Shard(-1)], (2, 3)),
    ([RaggedShard((0,), (1, 3)), Replicate()], (4, 2)),
    ([RaggedShard((0,), (0, 1)), Shard(1)], (4, 3)),
    ([vd.InterleavedShard(0, 2), Shard(1)], (6, 3)),
    ([Shard(0), Partial("avg")], (3, 2)),
    ([Replicate(), Replicate()], ()),
]


@pytest.mark.parametrize(("placements", "shape"), WHOLE_SHAPES)
@on_ranks(4, simulated=True)
def test_every_layout(placements, shape):
    mesh, whole = device_mesh((2, 2)), torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    laid = vd.distribute_tensor(whole, mesh, placements, src_data_rank=None)
    made = from_local(laid.to_local(), mesh, placements)
    assert made.shape == whole.shape
    assert torch.equal(made.full_tensor(), whole)


def _wrong(rank, world_size, case):
    mesh = device_mesh((2,))
    error, words = SAID[case]
    with pytest.raises(error, match=words):
        WRONG[case](mesh, rank)
    # Nobody is left behind: the next collective works.
    assert from_local(torch.ones(2), mesh, [Shard(0)]).sum().item() == 4


WRONG = {
    "sizes": lambda m, r: from_local(torch.ones(3 + 2 * r), m, [Shard(0)]),
    "replicated": lambda m, r: from_local(torch.ones(3 + r), m, [Replicate()]),
    "partial": lambda m, r: from_local(torch.ones(3 + r), m, [Partial()]),
    "dims": lambda m, r: from_local(torch.ones((2,) * (1 + r)), m, [Shard(0)]),
    "dtypes": lambda m, r: from_local(torch.ones(2, dtype=(torch.half, torch.int)[r]), m),
    "placements": lambda m, r: from_local(torch.ones(2, 2), m, [Shard(r)]),
    "shapes": lambda m, r: from_local(torch.ones(2), m, [Shard(0)], shape=(3 + r,)),
    "one rank's shape": lambda m, r: from_local(torch.ones(2 + r), m, [Shard(0)], shape=(4,)),
    "gradients": lambda m, r: from_local(torch.ones(2).requires_grad_(r == 1), m, [Shard(0)]),
    "another dim": lambda m, r: from_local(torch.ones(2, 3 + r), m, [Shard(0)]),
    "checks": lambda m, r: from_local(torch.ones(2), m, [Replicate()], run_check=r == 1),
    "an unknown check": lambda m, r: from_local(
        torch.ones(2), m, [Replicate()], run_check="always"
    ),
    "layouts of gradients": lambda m, r: from_local(
        torch.ones(2), m, [Replicate()], grad_placements=[(Partial(), Replicate())[r]]
    ),
    "memory orders": lambda m, r: from_local(
        torch.ones(3, 4) if r else torch.ones(4, 3).t(), m, [Shard(0)]
    ),
    "a DTensor of torch": lambda m, r: from_local(
        stock.DTensor.from_local(torch.ones(2), m, [stock.Shard(0)]), m, [Shard(0)]
    ),
}
SAID = {
    "sizes": (LayoutError, r"rank 0: \[3\]; rank 1: \[5\].*RaggedShard\(\(0,\), \(3, 5\)\)"),
    "replicated": (LayoutError, r"rank 0: \[3\]; rank 1: \[4\]"),
    "partial": (LayoutError, r"rank 0: \[3\]; rank 1: \[4\]"),
    "dims": (DisagreementError, "'dims': 1 on rank 0; 2 on rank 1"),
    "dtypes": (DisagreementError, "'dtype': f16 on rank 0; i32 on rank 1"),
    "placements": (DisagreementError, r"Shard\(0\).*Shard\(1\)"),
    "shapes": (DisagreementError, r"'shape=': \(3,\) on rank 0; \(4,\) on rank 1"),
    "one rank's shape": (LayoutError, r"found rank 0: \[2\]; rank 1: \[3\]"),
    "gradients": (DisagreementError, "'requires_grad': False on rank 0; True on rank 1"),
    "another dim": (
        LayoutError,
        r"rank 1: \[2, 4\]. Only dim 0 is sharded: all others have one extent",
    ),
    "checks": (DisagreementError, "none on rank 0; run_check=True on rank 1"),
    "an unknown check": (LayoutError, "run_check='always'; it is True, False or 'sampled'"),
    "layouts of gradients": (
        DisagreementError,
        r"'options': grad_placements=\[Partial.* on rank 0",
    ),
    "memory orders": (DisagreementError, r"'memory order': \[1, 0\] on rank 0; \[0, 1\]"),
    "a DTensor of torch": (LayoutError, "from_torch"),
}


@pytest.mark.parametrize("argument", ["shape", "stride", "units"])
@on_ranks(40, simulated=True)
def test_a_difference_at_the_end_of_a_long_text_is_found(rank, world_size, argument):
    """Rank 1 passes something else than all others, behind 256 bytes of units."""
    mesh, other = device_mesh((world_size,)), int(rank == 1)
    units = [1, *[10_000_001] * (world_size - 2)]  # no common divisor, so they stay as long
    last = units[1] + (other if argument == "units" else 0)
    options = {
        "shape": {"shape": (2 * world_size + other,)},
        "stride": {"shape": (2 * world_size,), "stride": (1 + other,)},
        "units": {},
    }
    ragged = RaggedShard((0,), (*units, last))
    with pytest.raises(DisagreementError, match=r"on ranks 0, 2-39; .* on rank 1"):
        from_local(torch.zeros(2), mesh, [ragged], **options[argument])
    assert from_local(torch.ones(2), mesh, [Shard(0)]).sum().item() == 2 * world_size


@on_ranks(2, simulated=True)
def test_all_dims_of_a_tensor_fit_into_what_is_sent(rank, world_size):
    local = torch.ones((1,) * 61 + (2, 3, 2 - rank))
    assert from_local(local, device_mesh((2,)), [Shard(63)]).shape == (*local.shape[:-1], 3)
    with pytest.raises(DisagreementError, match="f64 on rank 1"):
        from_local(local.double() if rank else local, device_mesh((2,)), [Shard(63)])


@on_ranks(2, simulated=True)
def test_calls_of_some_ranks_alone_do_not_count(rank, world_size):
    """Those ranks would count further, and the next call of all would wait for them."""
    mesh = device_mesh((2,))
    if rank == 0:
        token = silent.set(True)
        from_local(torch.ones(2), mesh, [Replicate()])
        silent.reset(token)
    for _ in range(3):
        assert from_local(torch.ones(2), mesh, [Replicate()]).sum().item() == 2


@pytest.mark.parametrize("case", WRONG)
def test_what_differs_is_an_error_on_every_rank(case):
    simulate(2)(_wrong, case)


def test_in_processes():
    run(_wrong, 2, "sizes")
    run(_one_axis, 3, 5, 0)


@pytest.fixture
def exchanges(monkeypatch):
    """Counts collectives of rank 0."""
    counted = Counter()
    for name in ("all_reduce", "all_gather"):
        own = getattr(dist, name)

        def counting(*args, _own=own, _name=name, **kwargs):
            counted[_name] += dist.get_rank() == 0
            return _own(*args, **kwargs)

        monkeypatch.setattr(dist, name, counting)
    return counted


def _counted(rank, world_size, extents, given):
    mesh = device_mesh((2,))
    for extent in extents:
        if given:
            from_local(torch.ones(extent[rank]), mesh, [Shard(0)], shape=(sum(extent),))
        else:
            from_local(torch.ones(extent[rank]), mesh, [Shard(0)])


EXCHANGED = [
    ([(2, 2)] * 5, False, {"all_reduce": 5}),
    ([(2, 2), (2, 1), (2, 2), (1, 1)], False, {"all_reduce": 4, "all_gather": 1}),
    ([(2, 2), (2, 1), (2, 1), (3, 3)], True, {"all_reduce": 2, "all_gather": 2}),
]


@pytest.mark.parametrize(("extents", "given", "expected"), EXCHANGED)
def test_what_is_exchanged(exchanges, extents, given, expected):
    simulate(2)(_counted, extents, given)
    assert {name: n for name, n in exchanges.items() if n} == expected


@on_ranks(4, simulated=True)
def test_run_check_compares_and_takes_over(rank, world_size):
    mesh = device_mesh((2, 2), ("dp", "tp"))
    local = torch.full((3,), float(rank)).requires_grad_()
    made = from_local(local, mesh, [Replicate(), Shard(0)], run_check=True)
    assert torch.equal(made.full_tensor(), torch.tensor([0.0] * 3 + [1.0] * 3))
    assert torch.equal(local.detach(), torch.full((3,), float(rank % 2)))  # as torch's does
    made.sum().backward()
    assert torch.equal(local.grad, torch.ones(3))
    with pytest.raises(DisagreementError, match="shape="):
        from_local(torch.ones(3), mesh, [Replicate()] * 2, shape=(3 + rank // 2,), run_check=True)
