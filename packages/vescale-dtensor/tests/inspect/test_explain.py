"""`explain` tells what ops did and sent, `strict` refuses what nobody meant, and plain tensors that
differ over ranks are noticed on every rank.
"""

import pytest
import torch
import torch.nn.functional as F
import vescale_dtensor as vd
from named_cases import named_cases
from vescale_comm import trace
from vescale_comm.testing import device_mesh, on_ranks, run
from vescale_dtensor import DisagreementError, Partial, Replicate, Shard, StrictError
from vescale_dtensor._dispatch import plain_operands as _plain
from vescale_dtensor.debug import watch_operands

CASES, case = named_cases()
GLOBAL = torch.arange(24.0).reshape(6, 4)


@torch.library.custom_op("vescale_test::distance", mutates_args=())
def distance(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """What nobody wrote a rule for: an op of a user's own."""
    return torch.cdist(x, y)


distance.register_fake(torch.cdist)


def run_case(rank, world, name):
    _plain.reset_comparisons()
    return CASES[name](device_mesh((2, 2), ("dp", "tp")))


def placed(mesh, dp, tp, grad=False, tensor=GLOBAL):
    leaf = tensor.clone().requires_grad_(grad)
    return vd.distribute_tensor(leaf, mesh, [dp, tp], src_data_rank=None)


def differs():
    """A plain tensor of which ranks 0, 1 and ranks 2, 3 hold different ones."""
    return torch.full((6, 4), float(torch.distributed.get_rank() // 2))


@case
def ops_are_recorded_with_their_layouts(mesh):
    x, y = placed(mesh, Shard(0), Replicate()), placed(mesh, Replicate(), Shard(1))
    with vd.explain() as report:
        product = x * y
        total = product.sum()
        distance(x, x)
        assert x.shape == (6, 4)
        assert x.size(0) == 6
    mul, reduced, custom = report.records
    assert mul.op == "Tensor.mul"
    assert [str(note) for note in mul.inputs] == ["f32[6@dp, 4]", "f32[6, 4@tp]"]
    assert [note.placements for note in mul.outputs] == [product.placements]
    assert mul.by == "rule pointwise"
    assert reduced.outputs[0].placements == total.placements
    assert reduced.by.startswith("rule ")
    assert custom.by == "fallback"
    assert report.fallbacks == [custom]
    assert [move.target for move in custom.moves] == [(Replicate(), Replicate())]  # `x`, once


@case
def bytes_are_those_of_the_trace(mesh):
    leaf = placed(mesh, Replicate(), Shard(0), grad=True)
    x = placed(mesh, Shard(0), Replicate())
    labels = placed(mesh, Shard(0), Replicate(), tensor=torch.tensor([0, 1, 2, 3, 4, 5]))
    with vd.explain() as report, trace() as traced:
        h = F.linear(x, leaf)
        F.cross_entropy(h, labels).backward()
        h.redistribute(placements=[Shard(1), Replicate()])
        vd.gradient_total(leaf)
        torch._foreach_add_([x], [placed(mesh, Replicate(), Shard(0))])
        x.sum().item()
    assert report.bytes == traced.bytes() > 0
    moved = [r for r in report.records if r.op == "redistribute"]
    assert moved[0].moves[0].source == (Shard(0), Shard(1))
    assert moved[0].bytes == moved[0].moves[0].plan.wire_bytes
    assert next(r for r in report.records if r.op == "_foreach_add_").moves


@case
def a_report_is_a_table(mesh):
    x = placed(mesh, Shard(0), Replicate())
    with vd.explain() as report:
        (x + 1).redistribute(placements=[Replicate(), Replicate()])
    lines = str(report).splitlines()
    assert lines[0].split() == ["op", "in", "out", "by", "moved", "bytes", "sent"]
    assert [line.split()[0] for line in lines[2:4]] == ["Tensor.add", "redistribute"]
    assert "dp: Shard(0) → Replicate()" in lines[3]
    assert lines[2][lines[0].index("out") :].startswith("f32[6@dp, 4]")
    assert lines[-1] == "2 ops, 48 bytes sent by this rank"
    return str(report)


@case
def explanations_nest_and_end(mesh):
    x = placed(mesh, Shard(0), Shard(1))
    with vd.explain() as outer:
        x + 1
        with trace() as traced, vd.explain() as inner:
            x * 2
        with pytest.raises(RuntimeError):
            x @ torch.ones(7, 7)
        x - 3
    x / 4
    assert [r.op for r in inner.records] == ["Tensor.mul"]
    assert [r.op for r in outer.records if r.outputs] == ["Tensor.add", "Tensor.mul", "Tensor.sub"]
    assert traced.counts() == {}
    assert vd._tensor.observers.observers == []


@case
def backward_shows_what_it_sends(mesh):
    leaf = placed(mesh, Shard(0), Replicate(), grad=True)
    whole = leaf.redistribute(placements=[Replicate(), Replicate()])
    loss = (whole * placed(mesh, Shard(1), Replicate())).sum()
    with vd.explain() as report, trace() as traced:
        loss.backward()
    sent = [r for r in report.records if r.bytes]
    assert [r.op for r in sent] == ["(gradient)"]
    assert sent[0].bytes == traced.bytes()


@case
def strict_about_scaling_refuses_what_all_ranks_compute(mesh):
    weight = placed(mesh, Replicate(), Replicate())
    x, y = placed(mesh, Shard(0), Replicate()), placed(mesh, Shard(0), Shard(0))
    with vd.strict(scaling=True):
        y @ weight.T
        weight + weight
        with pytest.raises(
            StrictError, match=r"linear .* \[\[6, 4\], \[6, 4\]\] .* every rank of tp"
        ):
            F.linear(x, weight)
        with pytest.raises(StrictError, match="every rank of dp, tp"):
            weight @ weight.T
        with vd.strict(False):
            weight @ weight.T
    with vd.strict():
        F.linear(x, weight)


@case
def watches_are_told_of_operands_that_move(mesh):
    x, y = placed(mesh, Shard(0), Replicate()), placed(mesh, Shard(1), Replicate())
    found = []
    with watch_operands(lambda operand, placements: found.append((operand, placements))):
        for _ in range(3):  # a compiled call tells as well
            x * y
        x.redistribute(placements=[Replicate(), Replicate()])
        distance(x, x)
    assert len(found) == 4
    assert found[-1] == (x, (Replicate(), Replicate()))
    assert all(one is x or one is y for one, _ in found)
    before = len(found)
    x * y
    assert len(found) == before


@case
def strict_refuses_fallbacks_and_moves(mesh):
    x, y = placed(mesh, Shard(0), Replicate()), placed(mesh, Shard(1), Replicate())
    with trace() as traced, vd.strict():
        with pytest.raises(StrictError, match=r"distance.* has no rule .* register_rule"):
            distance(x, x)
        with pytest.raises(StrictError, match=r"Tensor.mul would redistribute .* 'pointwise'.* dp"):
            x * y
        with pytest.raises(StrictError, match="_foreach_mul_ would"):
            torch._foreach_mul_([x], [y])
    assert traced.counts() == {}
    distance(x, x)
    x * y


@case
def strict_allows_what_is_asked_for(mesh):
    leaf = placed(mesh, Replicate(), Replicate(), grad=True)
    x = placed(mesh, Shard(0), Shard(1))
    optimizer = torch.optim.SGD([leaf], lr=0.5)
    with vd.strict():
        loss = (leaf * x).sum()
        loss.backward()
        assert loss.item() == (GLOBAL * GLOBAL).sum()
        assert x.redistribute(placements=[Replicate(), Shard(0)]).full_tensor().equal(GLOBAL)
        optimizer.step()
        distance(leaf.detach(), leaf.detach())  # replicated: the fallback moves nothing
    assert torch.equal(leaf.full_tensor(), GLOBAL / 2)


@case
def a_plain_tensor_that_differs_is_noticed(mesh):
    x = placed(mesh, Shard(0), Replicate())
    expected = r"(?s)Tensor.mul: operand 1 .* on ranks 0, 1; .* on ranks 2, 3.*from_local"
    with trace() as traced, pytest.raises(DisagreementError, match=expected):
        x * differs()
    assert traced.counts() == {}
    # Only at first: the check must not cost anything in the long run.
    x * GLOBAL
    assert (x * differs()).shape == (6, 4)
    with pytest.raises(DisagreementError, match="operand 0"):
        differs() - x
    with pytest.raises(DisagreementError, match=r"distance.*: operand 1"):
        distance(x, differs())
    with pytest.raises(DisagreementError, match="add_: operand 1"):
        torch._foreach_add_([x], [differs()])


@case
def strict_always_compares(mesh):
    x = placed(mesh, Shard(0), Replicate())
    alone = torch.tensor(float(torch.distributed.get_rank()))
    for _ in range(3):
        x * GLOBAL
    x * alone  # a number: not compared by itself
    with vd.strict():
        x * GLOBAL
        for wrong in (differs(), alone, differs().to(torch.bfloat16), differs().bool()):
            with pytest.raises(DisagreementError):
                x * wrong
        with vd.strict(False):
            x * differs()
            distance(x, x)
    _plain.reset_comparisons()
    with vd.strict(False):
        x * differs()


@case
def what_is_overwritten_is_not_compared(mesh):
    x = placed(mesh, Shard(0), Replicate())
    target = differs()
    with vd.strict():
        assert torch.equal(target.copy_(x.redistribute(placements=[Replicate()] * 2)), GLOBAL)
    assert torch.equal(differs().copy_(x), GLOBAL)


def test_digests_tell_tensors_apart():
    base = torch.arange(16.0).reshape(4, 4)
    others = [base, base.t(), base.flip(0), base + torch.eye(4), base[:3], base.double(), -base]
    assert len({_plain.digest(t).item() for t in others}) == len(others)
    assert _plain.digest(base.t().contiguous()).equal(_plain.digest(base.t()))
    for dtype in (torch.bool, torch.uint8, torch.bfloat16, torch.complex64, torch.float8_e4m3fn):
        assert _plain.digest(torch.zeros(3).to(dtype)).shape == (1,)
    assert _plain.digest(torch.zeros(0)).shape == (1,)


@pytest.mark.parametrize("name", CASES)
def test_explain(name):
    run(run_case, 4, name)


@on_ranks(2)
def test_a_partial_scalar_has_a_note():
    mesh = device_mesh((2,), ("dp",))
    term = vd.DTensor.from_local(torch.ones(()), mesh, [Partial()])
    with vd.explain() as report:
        term * 2
    assert str(report.records[0].outputs[0]) == "f32[], +dp"


def test_op_support_names_families():
    support = vd.op_support()
    assert support["torch.Tensor.add"] == "pointwise"
    assert support["torch.Tensor.size"] == "metadata"
    assert support["torch.lobpcg"] == "fallback"
    assert len(support) > 1000


def test_op_support_knows_placements():
    support = vd.op_support()
    # Of what a sweep's seed drew; all of it runs by its rule.
    assert support["torch.tanh"].placements["shard"] == "native"
    assert set(support["torch.tanh"].placements.values()) == {"native"}
    assert support["torch.tanh"].native
    assert not support["torch.lobpcg"].native
    seen = {name: one.placements for name, one in support.items() if one.placements}
    assert len(seen) > 500
    # What has no rule cannot have been seen to run by one.
    ruled = {name for name, kinds in seen.items() if set(kinds.values()) != {"fallback"}}
    assert not [name for name in ruled if not support[name].native]
