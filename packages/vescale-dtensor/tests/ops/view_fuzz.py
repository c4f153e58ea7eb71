"""Random views, slices and look-ups of random layouts, against one device.

A trial is its seed: shape, layout and op are drawn alike on every rank. It compares the values, the
gradient, and what in-place ops on the result do to the tensor from which it was taken.
"""

from __future__ import annotations

import random
from math import prod

import torch
import vescale_dtensor as vd
from redistribution_oracle import legal
from rule_fuzz import agree, phase, words_of
from vescale_comm import trace
from vescale_comm.testing import device_mesh
from vescale_dtensor import (
    InterleavedShard,
    RaggedShard,
    Replicate,
    Shard,
    StridedShard,
    UnsupportedError,
    gradient_total,
)

EXTENTS = [0, 1, 1, 2, 3, 4, 5, 6, 8, 12]


def shape_of(chosen):
    return tuple(chosen.choice(EXTENTS) for _ in range(chosen.randint(1, 4)))


def shard_of(chosen, count, ndim):
    dim = chosen.randrange(ndim)
    kind = chosen.randrange(8)
    if kind < 4:
        return Shard(dim)
    if kind == 4:
        return InterleavedShard(dim, chosen.randint(2, 4))
    if kind == 5:
        return StridedShard(dim, chosen.randint(2, 3))
    last = dim if kind == 6 else chosen.randint(dim, ndim - 1)
    return RaggedShard(range(dim, last + 1), [chosen.randint(0, 2) for _ in range(count)])


def layout_of(chosen, sizes, shape):
    found = []
    for count in sizes:
        cut = shard_of(chosen, count, len(shape)) if chosen.random() < 0.8 else Replicate()
        fits = legal((*found, cut), sizes[: len(found) + 1], shape)
        found.append(cut if fits else Replicate())
    return found


def factors(chosen, numel, count):
    found = []
    for _ in range(count - 1):
        found.append(chosen.choice([n for n in range(1, numel + 1) if numel % n == 0]))
        numel //= found[-1]
    return [*found, numel]


def reshaped(chosen, shape):
    numel = prod(shape)
    target = factors(chosen, numel, chosen.randint(1, 4)) if numel else [*shape, 1][::-1]
    if numel and chosen.random() < 0.3:
        target[chosen.randrange(len(target))] = -1
    return f"reshape {target}", lambda x: x.reshape(target)


def flattened(chosen, shape):
    start = chosen.randrange(len(shape))
    end = chosen.randint(start, len(shape) - 1)
    return f"flatten {start} {end}", lambda x: x.flatten(start, end)


def unflattened(chosen, shape):
    dim = chosen.randrange(len(shape))
    sizes = factors(chosen, shape[dim], chosen.randint(2, 3)) if shape[dim] else [0, 3]
    return f"unflatten {dim} {sizes}", lambda x: x.unflatten(dim, sizes)


def basic_item(chosen, extent):
    kind = chosen.randrange(5)
    if kind == 0 and extent:
        return chosen.randrange(-extent, extent)
    if kind == 1:
        return slice(None)
    low, high = sorted((chosen.randint(0, extent), chosen.randint(0, extent)))
    return slice(low, high, chosen.choice([None, 1, 2, 3]))


def indexed(chosen, shape):
    items = [basic_item(chosen, n) for n in shape[: chosen.randint(1, len(shape))]]
    if chosen.random() < 0.3:
        items.insert(chosen.randrange(len(items) + 1), None)
    if chosen.random() < 0.2:
        items.append(...)
    return f"index {items}", lambda x: x[tuple(items)]


def narrowed(chosen, shape):
    dim = chosen.randrange(len(shape))
    start = chosen.randint(0, shape[dim])
    length = chosen.randint(0, shape[dim] - start)
    return f"narrow {dim} {start} {length}", lambda x: x.narrow(dim, start, length)


def selected(chosen, shape):
    dims = [d for d, n in enumerate(shape) if n]
    if not dims:
        return narrowed(chosen, shape)
    dim = chosen.choice(dims)
    at = chosen.randrange(shape[dim])
    return f"select {dim} {at}", lambda x: x.select(dim, at)


def piece_of(chosen, shape):
    dim = chosen.randrange(len(shape))
    name = chosen.choice(["chunk", "split", "tensor_split", "unbind", "split_with_sizes"])
    count = chosen.randint(1, 4)
    pick = chosen.randrange(4)
    if name == "unbind" and not shape[dim]:
        name = "chunk"
    cuts = sorted(chosen.randint(0, shape[dim]) for _ in range(2))
    argument = {
        "unbind": (),
        "split_with_sizes": ([cuts[0], cuts[1] - cuts[0], shape[dim] - cuts[1]],),
    }.get(name, (count,))

    def call(x):
        found = getattr(x, name)(*argument, dim=dim)
        return found[pick % len(found)]

    return f"{name} {argument} {dim} [{pick}]", call


def looked_up(chosen, shape):
    dims = [d for d, n in enumerate(shape) if n]
    if not dims:
        return narrowed(chosen, shape)
    dim = chosen.choice(dims)
    generator = torch.Generator().manual_seed(chosen.randrange(1000))
    index = torch.randint(shape[dim], (chosen.randint(0, 5),), generator=generator)
    kind = chosen.randrange(4)
    if kind == 0:
        return f"index_select {dim} {index.tolist()}", lambda x: x.index_select(dim, index)
    if kind == 1:
        places = [n if d != dim else 3 for d, n in enumerate(shape)]
        at = torch.randint(shape[dim], places, generator=generator)
        return f"gather {dim} {places}", lambda x: x.gather(dim, at)
    items = [slice(None)] * dim + [index - shape[dim] if kind == 2 else index]
    if dim + 1 < len(shape) and shape[dim + 1] and chosen.random() < 0.5:
        items.append(torch.randint(shape[dim + 1], (1,), generator=generator))
    return f"advanced {items}", lambda x: x[tuple(items)]


VIEWS = [reshaped, flattened, unflattened, indexed, narrowed, selected, piece_of]
COPIES = [looked_up]


def run_views(rank, world_size, sizes, seeds):
    """What went wrong, by seed; and how many results were taken without a word on the wire."""
    mesh = device_mesh(sizes)
    wrong, silent, done = [], 0, 0
    for seed in seeds:
        chosen = random.Random(seed)
        shape = shape_of(chosen)
        placements = layout_of(chosen, sizes, shape)
        kind = chosen.choice([*VIEWS, *VIEWS, *COPIES])
        words, call = kind(chosen, shape)
        told = f"seed {seed}: {words} of {list(shape)} {placements}"
        checks = [values, gradient, *([writes] if kind in VIEWS else [])]
        for check in checks:
            quiet, error = phase(lambda: check(mesh, shape, placements, call, seed))  # noqa: B023
            if agree(error is not None):
                words = words_of(error) if error else "another rank went wrong"
                wrong.append(f"{told}: {check.__name__}: {words}")
                break
            if check is values:
                silent, done = silent + bool(quiet), done + 1
    return wrong, silent, done


def distributed(mesh, shape, placements, seed):
    dense = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return dense, vd.distribute_tensor(dense, mesh, placements, src_data_rank=None)


def values(mesh, shape, placements, call, seed):
    dense, x = distributed(mesh, shape, placements, seed)
    with trace() as seen:
        found = call(x)
    wanted = call(dense)
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    assert torch.equal(found.full_tensor(), wanted), (
        f"{found} {found.full_tensor()} is not {wanted}"
    )
    return not seen.records


def gradient(mesh, shape, placements, call, seed):
    dense, x = distributed(mesh, shape, placements, seed)
    dense.requires_grad_()
    x.requires_grad_()
    wanted = call(dense)
    weight = torch.randn(
        wanted.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7)
    )
    (wanted * wanted * weight).sum().backward()
    found = call(x)
    (found * found * weight).sum().backward()
    got = gradient_total(x)
    torch.testing.assert_close(got.full_tensor(), dense.grad, rtol=1e-12, atol=1e-12)


def writes(mesh, shape, placements, call, seed):
    """In place on a view writes through, or is refused and changes nothing; also below autograd."""
    for recorded in (False, True):
        dense, x = distributed(mesh, shape, placements, seed)
        leaf, mine = dense.clone().requires_grad_(recorded), x.clone().requires_grad_(recorded)
        base, ours = leaf * 1, mine * 1
        view, taken = call(base), call(ours)
        if not view._is_view() and view.data_ptr() != base.data_ptr():
            return  # a copy on one device, too
        try:
            view.mul_(3)
        except RuntimeError:
            return  # one of several results at once is not written to below autograd
        try:
            taken.mul_(3)
        except UnsupportedError:
            assert torch.equal(ours.full_tensor(), leaf)
            return
        assert torch.equal(ours.full_tensor().detach(), base.detach()), "the base is another"
        if not recorded:
            continue
        (base * base).sum().backward()
        (ours * ours).sum().backward()
        got = gradient_total(mine).full_tensor()
        torch.testing.assert_close(got, leaf.grad, rtol=1e-12, atol=1e-12)
