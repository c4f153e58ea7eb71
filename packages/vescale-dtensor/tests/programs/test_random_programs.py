"""Random programs equal one device on all ranks, with their first and second derivatives.

They are of views, writes, operators, numbers of all kinds and the rules' own cases; `nox -s fuzz`
runs any number of them.
"""

from dataclasses import replace
from itertools import chain, product

import pytest
import shrinking
import torch
from beside import Failure, judge, spread_inputs
from grammars import GRAMMARS, VIEWS, Grammar
from random_programs import LEVELS, Input, Program, generate, run_line, space
from shrinking import pasted, shrunk
from vescale_comm import simulate, trace
from vescale_dtensor import Partial, Replicate, Shard, init_device_mesh, zeros


def check(grammar, seeds):
    failures = []
    for seed in seeds:
        program = generate(grammar, seed)
        failure, _ = judge(program)
        if failure is not None:
            failures.append(pasted(*shrunk(program, failure)))
    assert not failures, "\n\n".join(failures)


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_programs_equal_one_device(grammar):
    check(grammar, range(8))


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("grammar", GRAMMARS)
@pytest.mark.parametrize("start", range(1000, 4000, 500))
def test_many_programs(grammar, start):
    check(grammar, range(start, start + 500))


WANTED, PLAIN = True, False
FOUND = {
    # What random programs have found: the mesh, x0 (shape, layout, gradient), and the lines.
    "a view of a leaf is transposed": ((2,), (3, 4), "[Shard(0)]", WANTED, [
        "x1 = x0.mT", "x1.t_()", "x2 = x0[:]", "x2.squeeze_(1)", "x3 = x0.expand((2, -1, -1))",
        "x3.transpose_(-3, 1)", "x4 = x0.swapaxes(-1, -1)", "x4.fill_diagonal_(0.5)"]),
    "a diagonal is indexed": ((2,), (5, 1, 5, 4), "[Replicate()]", PLAIN, [
        "x1 = x0.diagonal(-1, -1, -4)", "x2 = x1[:, torch.tensor([3, 2, 3, 2])]"]),
    "a leaf without dims is assigned at a mask": ((2,), (), "[Replicate()]", WANTED, [
        "x0[(x0 > 9)] = 2.0"]),
    "one of several views is transposed": ((2,), (6, 2), "[Shard(0)]", WANTED, [
        "x1 = x0.triu(1)", "x2 = x1.chunk(2, 1)[-1]", "x2.t_()",
        "x3 = x1.unbind(1)[0].view((2, 3))", "x3.unsqueeze_(0)", "x4 = x1 * 2", "x4.t_()"]),
    "a dim behind flat ones is repeated": (
        (2,), (4, 5, 6), "[RaggedShard((0, 1), (1, 1))]", WANTED, [
        "x1 = x0.repeat_interleave(2, 2)", "x2 = x0.repeat_interleave(1, 2)"]),
    "an expanded tensor is copied into itself": ((2,), (1, 4), "[Shard(1)]", PLAIN, [
        "x1 = x0.expand((3, 4))", "x1.copy_(x1)", "x2 = x1 * x1"]),
    "a view is written of which one rank has nothing": ((3,), (7, 1, 4), "[Shard(2)]", WANTED, [
        "x1 = torch.where((x0 > 0), x0, x0)", "x2 = x1.mT", "x2.clamp_(-1, 1)", "x3 = x2 * 1"]),
    "a detached copy of a view of a leaf": ((2,), (1,), "[Shard(0)]", WANTED, [
        "x1 = x0.squeeze()", "x2 = x1.detach()", "x2.squeeze_(-1)"]),
    "a part of a view of a leaf, which one rank has": ((2,), (4,), "[Shard(0)]", WANTED, [
        "x1 = x0.t()", "x1[-2, ...] = -1", "x1[-2].unsqueeze_(0)",
        "x2 = x0[:2].unflatten(0, (2, 1))", "x2.squeeze_(1)"]),
    "a copied view becomes its own view twice": ((2,), (3, 1), "[Shard(1)]", PLAIN, [
        "x1 = x0.view_as(x0)", "x1.unsqueeze_(-1)", "x2 = x1.expand((2, -1, 3, -1))",
        "x2.transpose_(-2, -3)"]),
    "windows lie beside what they hold": ((2, 2), (2, 6, 3), "[Shard(0), Shard(2)]", WANTED, [
        "x1 = x0.unfold(1, 2, 2)", "x2 = x1 * 2.0", "x3 = torch.where((x1 > 0), x1, x1)",
        "x4 = x0.unfold(1, 3, 1).exp()"]),
    "a leaf that a kernel cut out of something": ((2,), (4,), "[InterleavedShard(0, 2)]", WANTED, [
        "x1 = x0.view((4, 1, 1))", "x0.detach().fill_(0.25)", "x2 = x1 * 3"]),
    "a part that is no output of several": ((2,), (4, 4), "[Shard(1)]", WANTED, [
        "x1 = (x0 * 1).tensor_split(2, -1)[1]", "x1.relu_()", "x2 = (x0 * 1).hsplit(2)[0]",
        "x2.mul_(2)"]),
    "a replicated leaf whose diagonal is written": ((2,), (2, 4), "[Replicate()]", WANTED, [
        "x0.fill_diagonal_(0.5)"]),
    "a write reads its memory in another shape": ((2,), (1, 7), "[Shard(1)]", PLAIN, [
        "x1 = x0[:, :6:2]", "x2 = x1[None]", "x2.add_(x1)", "x2.add_(x1)"]),
    "a diagonal becomes its own view": ((4,), (4, 1, 7), "[Shard(2)]", PLAIN, [
        "x1 = x0.diagonal(2, -2, -1)", "x1.unsqueeze_(0)", "x1.relu_()", "x1.squeeze_()"]),
    "a matrix becomes its own view beside its diagonal": ((2,), (4, 4), "[Shard(0)]", PLAIN, [
        "x1 = x0.diagonal(1)", "x0.t_()", "x1.add_(100)"]),
    "a diagonal of the first dims": ((2,), (3, 4, 4), "[Shard(2)]", WANTED, [
        "x1 = x0.diagonal(1, 1, -3)", "x2 = x1 * 2", "x3 = F.normalize(x1, dim=-2)"]),
    "some ranks look nothing up": ((2,), (7, 4), "[Shard(0)]", WANTED, [
        "x1 = (x0.detach()[:1, :1] * 0).long()", "x2 = F.embedding(x1, x0)",
        "x3 = F.embedding(x1, to(x0, [Replicate()]))"]),
    "a product of bools": ((2,), (1, 4), "[Shard(0)]", PLAIN, [
        "x1 = x0 > 0", "x2 = x1 @ x1.mT", "x3 = torch.einsum('ik,jk->ij', x1, x1)",
        "x4 = F.l1_loss(x0.long(), x0.long())"]),
    "what is among others lies row by row": ((2,), (3, 5), "[Shard(0)]", PLAIN, [
        "x1 = torch.isin(x0.mT, x0)"]),
    "a leaf is negated without a derivative": ((2,), (3, 4), "[Partial()]", WANTED, [
        "x0.logical_not_()"]),
    "an element of a leaf is written without a record": ((2,), (4,), "[Shard(0)]", WANTED, [
        "x1 = x0.select(-1, 1)", "with torch.no_grad(): x1[...] = 0.5"]),
    "a scalar is assigned to itself": ((2,), (), "[Replicate()]", PLAIN, ["x0[..., None] = x0"]),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_found(name):
    sizes, shape, placements, wants, lines = FOUND[name]
    inputs = (Input("x0", shape, "float64", placements, wants),)
    for level in LEVELS:
        failure, _ = judge(Program(name, 0, sizes, inputs, tuple(lines), level))
        assert failure is None, failure


def test_a_program_is_determined_by_its_grammar_and_number():
    for grammar in GRAMMARS:
        assert generate(grammar, 3) == generate(grammar, 3) != generate(grammar, 4)


def test_ranks_that_wait_for_each_other_are_a_failure():
    line = "x9 = x0.clone() if torch.distributed.get_rank() else to(x0, [Shard(0)])"
    inputs = (Input("x0", (3,), "float64", "[Partial()]", wants=False),)
    failure, _ = judge(Program("views", 0, (2,), inputs, (line,), "values"))
    assert failure is not None
    assert failure.words.startswith("rank ")


def test_a_failure_is_made_small(monkeypatch):
    def fails(program):
        return (Failure("values", "") if "x0.neg_()" in program.lines else None), ()

    monkeypatch.setattr(shrinking, "judge", fails)
    program = generate("operators", 5)
    lines = (*program.lines, "x0.neg_()", "x99 = x0 * 2")
    small, failure = shrunk(replace(program, lines=lines), Failure("values", ""))
    assert small.lines == ("x0.neg_()",)
    assert small.level == "values"
    assert all("Shard" not in each.placements for each in small.inputs)
    drawn = (generate("operators", seed) for seed in range(20))
    for each in (small, next(each for each in drawn if each.level == LEVELS[2])):
        exec(compile(pasted(each, failure), "pasted", "exec"), {})


def quiet_views(rank, world_size, programs):
    mesh, quiet = init_device_mesh("cpu", (world_size,)), []
    for program in programs:
        names = space(None, spread_inputs(program, mesh))
        with trace() as seen:
            assert run_line(program.lines[0], names) is None
        quiet.append(not seen.records)
    return quiet


def test_most_views_send_nothing():
    drawn = [generate("alone", seed, Grammar(VIEWS, length=2)) for seed in range(150)]
    programs = [each for each in drawn if each.sizes == (3,) and each.lines]
    programs = [each for each in programs if run_line(each.lines[0], space(None, {
        one.name: torch.zeros(one.shape) for one in each.inputs})) is None]  # fmt: skip
    quiet = simulate(3).run(quiet_views, programs)[0]
    assert sum(quiet) > 0.75 * len(quiet)


def test_a_view_of_the_same_shape_keeps_the_layout():
    """Also of dims of one, which several axes shard: recomputations take such views."""

    def program(rank, world_size):
        mesh, found = init_device_mesh("cpu", (2, 2)), []
        for where in product([Shard(0), Shard(1), Replicate(), Partial()], repeat=2):
            x = zeros(1, 1, 4, device_mesh=mesh, placements=where)
            found.append((x.view(1, 1, 4).placements, x.reshape(1, -1, 4).placements, where))
        return found

    for same, other, where in chain(*simulate(4).run(program)):
        assert same == other == where
