"""All ranks of a redistribution in one process, with dense stand-ins for the collectives."""

from __future__ import annotations

import torch
from redistribution_oracle import fold, frame_of
from vescale_dtensor._redistribute import execute as _transport
from vescale_dtensor._redistribute.exchange import pack, source_regions, unpack
from vescale_dtensor._redistribute.lower import plan_steps
from vescale_dtensor._redistribute.ownership import coordinates_along
from vescale_dtensor._redistribute.regions import count
from vescale_dtensor._redistribute.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    PackedAllGather,
    PackedAllToAll,
    PackedReduceScatter,
    ReduceScatter,
)


def plans_of(case, coordinates):
    return {c: plan_steps(case.source, case.target, frame_of(case, c)) for c in coordinates}


def signature(step):
    """What all ranks have to agree on."""
    return type(step), step.axes, getattr(step, "op", None), getattr(step, "dim", None)


def simulate(case, plans, local_by_coordinate):
    """Run the plans of all coordinates, collective by collective."""
    values = dict(local_by_coordinate)
    queues = {c: list(steps) for c, steps in plans.items()}
    while True:
        for c, queue in queues.items():
            while queue and not queue[0].axes:
                step = queue.pop(0)
                values[c] = _transport._execute(step, values[c], None)
                assert tuple(values[c].shape) == step.shape
        if not any(queues.values()):
            return values
        heads = {c: queue.pop(0) for c, queue in queues.items()}
        assert len({signature(step) for step in heads.values()}) == 1
        values = {c: _collective(c, heads, values, case.sizes) for c in values}
        assert all(tuple(values[c].shape) == heads[c].shape for c in values)


def _collective(coordinate, heads, values, sizes):
    step = heads[coordinate]
    members = list(coordinates_along(coordinate, step.axes, sizes))
    rank, inputs = members.index(coordinate), [values[m] for m in members]
    if isinstance(step, AllReduce):
        return fold(inputs, step.op)
    if isinstance(step, ReduceScatter):
        reduced = fold(inputs, step.op)
        sizes = step.sizes or even(reduced.shape[step.dim], len(members))
        return reduced.split(sizes, step.dim)[rank].clone()
    if isinstance(step, AllGather):
        sizes = step.sizes or even(step.shape[step.dim], len(members))
        assert [x.shape[step.dim] for x in inputs] == list(sizes)
        return torch.cat(inputs, step.dim)
    if isinstance(step, AllToAll):
        sent = [heads[m].send[rank] for m in members]
        inputs = [source_regions(x, piece) for x, piece in zip(inputs, sent, strict=True)]
        packed = pack(values[coordinate], step.exchange.send)
        own = [source_regions(values[coordinate], piece).reshape(-1) for piece in step.send]
        assert torch.equal(packed, torch.cat(own))
    if isinstance(step, PackedReduceScatter | PackedAllGather | PackedAllToAll):
        return _put_runs(step, _runs(step, [heads[m] for m in members], rank, inputs))
    return _put_together(step, inputs)


def even(extent, members):
    """As much for each; a step says so by saying nothing."""
    assert extent % members == 0
    return (extent // members,) * members


def _runs(step, heads, rank, inputs):
    """The runs that arrive, and where they go."""
    if isinstance(step, PackedAllToAll):
        sent = [_transport._pack(x, head.send[rank]) for x, head in zip(inputs, heads, strict=True)]
        return list(zip(sent, step.receive, strict=True))
    packed = [_transport._pack(x, head.source) for x, head in zip(inputs, heads, strict=True)]
    if isinstance(step, PackedAllGather):
        assert [len(x) for x in packed] == list(step.sizes)
        return [(torch.cat(packed), step.target)]
    return [(fold(packed, step.op).split(step.sizes)[rank].clone(), step.target)]


def _put_runs(step, parts):
    result = _transport._unpack(parts, step.shape)
    times = torch.zeros(step.shape)
    for part, regions in parts:
        assert len(part) == count(regions)
        for region in regions:
            times.as_strided(region.shape, region.strides, region.offset).add_(1)
    assert bool((times == 1).all()), "an element arrived not once"
    return result


def _put_together(step, parts):
    places = step.receive if isinstance(step, AllToAll) else step.pieces
    result, times = torch.zeros(step.shape, dtype=parts[0].dtype), torch.zeros(step.shape)
    for place, part in zip(places, parts, strict=True):
        assert tuple(part.shape) == place.shape
        region = tuple(map(slice, place.start, map(sum, zip(*place, strict=True))))
        result[region] += part
        times[region] += 1
    assert bool((times == 1).all()), "an element arrived not once"
    packing = step.exchange.receive if isinstance(step, AllToAll) else step.packing
    flat = torch.cat([part.reshape(-1) for part in parts])
    assert torch.equal(result, unpack(flat, packing, step.shape))
    return result
