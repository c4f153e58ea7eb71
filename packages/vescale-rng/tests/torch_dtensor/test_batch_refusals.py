"""Property: what `consistent` cannot know is refused in words, on every rank.

Which rows a new tensor has, whether a plain tensor is a part of a batch, ranks that disagree, ops
whose values decide how much they draw.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from batch_ranks import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from vescale_rng import RngError
from vescale_rng.torch_dtensor import consistent


def said(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except RngError as error:
        return type(error).__name__, str(error)
    return None


def refused(rank, world):
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    ones, found = torch.ones(3, 4), {}
    with consistent(data=mesh["dp"]):
        found["factory"] = said(torch.rand, 3)
        found["poisson"] = said(torch.poisson, ones)
        found["rrelu"] = said(F.rrelu, -ones, training=True)
        found["one row"] = said(torch.multinomial, torch.ones(5), 2)
        found["gaps"] = said(torch.ones(4, 8)[:, ::2].normal_)
        found["gaps on one rank"] = said(
            (torch.ones(4, 8)[:, ::2] if rank else torch.ones(4, 4)).normal_
        )
        found["lengths"] = said(F.dropout, torch.ones(3, 4 + rank))
        found["ops"] = said(F.dropout, ones) if rank else said(torch.randn_like, ones)
        torch.manual_seed(rank)
        found["seeds"] = said(F.dropout, ones)
        torch.manual_seed(0)
        empty = torch.ones(3 * rank, 4, 4)
        lstm = nn.LSTM(4, 4, 2, dropout=0.5, batch_first=True)
        found["empty lstm"] = said(lstm, empty)
        packed = nn.utils.rnn.pack_padded_sequence(torch.ones(2, 3, 4), [3, 2], batch_first=True)
        found["packed lstm"] = said(lstm, packed)
        found["none"] = said(F.dropout, ones)
    with consistent(data=mesh["dp"], rows=2):
        found["multiple"] = said(F.dropout, ones)
        found["none told"] = said(F.dropout, ones[:2])
    with consistent(data=mesh["dp"], batch_dim=3):
        found["dim"] = said(F.dropout, ones)
    for name, bad in {"data": {"data": "dp"}, "rows": {"data": mesh, "rows": (1, 2, 3)}}.items():
        found[f"bad {name}"] = said(consistent(**bad).__enter__)
    found["bad factories"] = said(consistent(data=mesh, factories="yes").__enter__)
    return found


WORDS = {
    "factory": ("LayoutError", 'factories="rows"'),
    "poisson": ("LayoutError", "how many numbers each row takes"),
    "rrelu": ("LayoutError", "how many numbers each row takes"),
    "one row": ("LayoutError", "how many numbers each row takes"),
    "gaps": ("LayoutError", "gaps in its memory"),
    "gaps on one rank": ("LayoutError", ""),
    "lengths": ("LayoutError", "differ in more than the batch's dim"),
    "ops": ("LayoutError", "not all data ranks"),
    "seeds": ("StateError", "Seed every rank alike"),
    "empty lstm": ("LayoutError", "lstm"),
    "packed lstm": ("LayoutError", "pad instead of packing"),
    "multiple": ("LayoutError", "no multiple of the 2 rows"),
    "dim": ("LayoutError", "batch_dim"),
    "bad data": ("LayoutError", "takes a DeviceMesh"),
    "bad rows": ("LayoutError", "one number of rows for all"),
    "bad factories": ("LayoutError", '"rows", "whole" or None'),
}


def test_what_cannot_be_known_is_refused_on_every_rank():
    for found in run(refused, ranks=2):
        assert found.pop("none") is None
        assert found.pop("none told") is None
        for name, (kind, words) in WORDS.items():
            assert found[name] is not None, name
            assert found[name][0] == kind, name
            if name != "empty lstm":
                assert words in found[name][1], name


def dim_by_shape(shape):
    return {2: 0, 3: 1}[len(shape)]


NORMAL = torch.Tensor.normal_
# What one rank alone draws, when the other draws the same op of a (4, 4) of ones; what is said.
TROUBLED = {
    "gaps": (lambda _: torch.ones(4, 8)[:, ::2].normal_(), "gaps in its memory"),
    "multiple": (lambda _: torch.ones(3, 4).normal_(), "no multiple of the 2 rows"),
    "proportion": (
        lambda _: torch.ones(2, 4).normal_(),
        "not in the proportion of consistent(rows=[2, 2])",
    ),
    "no such dim": (lambda _: torch.ones(3).normal_(), "has no dim 1"),
    "batch_dim fails": (lambda _: torch.ones(1, 2, 2, 4).normal_(), "raised KeyError: 4"),
    "too many dims": (lambda _: torch.ones((1,) * 18).normal_(), "more than 16 dims"),
    "partial": (
        lambda tp: DTensor.from_local(torch.ones(4, 4), tp, [Partial()]).normal_(),
        "terms of a sum",
    ),
    "one row": (lambda _: torch.multinomial(torch.ones(4), 2), "how many numbers each row takes"),
}


def trouble_of_one_rank(rank, world, told):
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("dp", "tp"))
    found = {}
    for name, (draw, _) in TROUBLED.items():
        for troubled in range(world):
            options = {"rows": 2} if told else {}
            if name == "no such dim":
                options["batch_dim"] = 1
            if name == "batch_dim fails":
                options["batch_dim"] = dim_by_shape
            other = torch.ones(4, 4)
            same = partial(torch.multinomial, num_samples=2) if name == "one row" else NORMAL
            call = (draw, mesh["tp"]) if rank == troubled else (same, other)
            before = torch.get_rng_state()
            with consistent(data=mesh["dp"], **options):
                refusal = said(*call)
                unmoved = torch.equal(torch.get_rng_state(), before)
                # Nobody is left behind in a collective of the first draw.
                again = said(torch.ones(4, 4).normal_)
            found[name, troubled] = refusal, unmoved, again
    return found


@pytest.mark.parametrize("told", [False, True])
def test_what_one_rank_cannot_draw_is_the_same_error_on_every_rank(told):
    first, second = run(trouble_of_one_rank, told, ranks=2)
    # Sizes and proportions are nobody's business where the ranks ask each other.
    allowed = set() if told else {"multiple", "proportion"}
    for (name, troubled), (refusal, unmoved, again) in first.items():
        assert second[name, troubled] == (refusal, unmoved, again), (name, troubled)
        assert again is None, (name, troubled)
        if name in allowed:
            assert refusal is None, name
            continue
        assert refusal is not None, (name, troubled)
        assert refusal[0] == "LayoutError"
        assert TROUBLED[name][1] in refusal[1], (name, refusal[1])
        assert unmoved, (name, troubled)
        if name != "proportion":
            assert f"data rank(s) [{troubled}] cannot draw" in refusal[1], name


def trouble_later(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    found = []

    def block():
        with consistent(data=mesh, rows=2):
            torch.ones(2, 4).normal_()
            found.append(said(torch.ones(3 if rank else 2, 4).normal_))

    found.append(said(block))
    torch.manual_seed(0)
    with consistent(data=mesh, rows=2):
        found.append(said(torch.ones(2, 4).normal_))
    return found


def test_rows_that_are_contradicted_after_the_first_draw():
    alone, end = "Only this rank can know", "at the end the random generators"
    first, second = run(trouble_later, ranks=2)
    assert first[0] is None
    assert second[0][0] == "LayoutError"
    assert alone in second[0][1]
    for found in (first, second):
        # One rank drew and the other did not: the end of the block finds it on both.
        assert found[1][0] == "StateError"
        assert end in found[1][1]
        assert found[2] is None


def unsaid(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    ones, found = torch.ones(3, 4), {}
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    with consistent():
        found["rand"] = torch.equal(torch.rand(1), expected)
        found["dropout"] = said(F.dropout, ones)
        found["normal_"] = said(torch.empty(3).normal_)
        found["trunc"] = said(nn.init.trunc_normal_, torch.empty(3))
        weight = nn.Linear(2, 2).weight
        found["parameter"] = said(nn.init.normal_, weight)
        found["dtensor"] = said(F.dropout, DTensor.from_local(ones, mesh, [Shard(0)]))
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
        model(ones)
        found["rand after ddp"] = said(torch.rand, 1)
        found["ddp"] = said(
            nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Dropout())), ones
        )
    with consistent(data=None):
        found["data=None"] = said(F.dropout, ones)
    found["outside"] = said(F.dropout, ones)
    return found


def test_nothing_said_and_several_ranks():
    for found in run(unsaid, ranks=2):
        assert found.pop("rand")
        for name in ("dropout", "normal_", "trunc", "rand after ddp", "ddp"):
            assert found[name][0] == "LayoutError", name
            assert 'consistent(data=mesh["dp"])' in found[name][1]
        for name in ("parameter", "dtensor", "data=None", "outside"):
            assert found[name] is None, name


def test_one_rank_needs_no_data():
    with consistent(), consistent(data=None):
        F.dropout(torch.ones(3))
        torch.rand(2)
