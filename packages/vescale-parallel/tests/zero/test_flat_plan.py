"""A flat plan gives every element one owner and cuts no granule; a plan's words are checked."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from vescale_parallel import Plan, PlanError, Zero
from vescale_parallel._zero.flat_plan import FlatPlan, SlotRequest, plan_flat
from vescale_parallel._zero.units import unit_names, unit_of


@st.composite
def wanted(draw: st.DrawFn) -> SlotRequest:
    rows, columns = draw(st.integers(0, 9)), draw(st.integers(1, 7))
    granule = draw(st.sampled_from([1, columns, max(1, rows * columns)]))
    return SlotRequest((f"p{draw(st.integers())}",), (rows, columns), granule)


@settings(deadline=None, max_examples=100)
@given(st.lists(wanted(), max_size=6), st.integers(1, 9), st.sampled_from([1, 4, 8]))
def test_every_element_has_one_owner(tensors: list[SlotRequest], shards: int, alignment: int):
    plan = plan_flat(tensors, shards, alignment)
    assert [(one.names, one.shape) for one in plan.slots] == [(t.names, t.shape) for t in tensors]
    assert all(one.offset % alignment == 0 for one in plan.slots)
    assert all(one.end <= two.offset for one, two in pairwise(plan.slots))
    assert plan.is_even
    assert plan.largest % alignment == 0
    ranges = [plan.ranges(rank) for rank in range(shards)]
    for index, slot in enumerate(plan.slots):
        owned = [each[index] for each in ranges]
        assert sum(plan.shares(index)) == slot.numel
        assert [i for low, high in owned for i in range(low, high)] == list(range(slot.numel))
        for rank, (low, high) in enumerate(owned):
            assert low % slot.granule == high % slot.granule == 0 or low == high
            if low < high:
                assert plan.start(rank) <= slot.offset + low
                assert slot.offset + high <= plan.start(rank) + plan.sizes[rank]


def test_without_granules_the_padding_is_that_of_alignment():
    plan = plan_flat(
        [SlotRequest(("a",), (33, 7)), SlotRequest(("b",), (5,)), SlotRequest(("c",), (1,))], 4
    )
    assert (plan.total, plan.padding) == (240, 3)
    assert plan.shares(0) == (60, 60, 60, 51)
    assert plan.shares(2) == (0, 0, 0, 1)


def test_a_plan_is_a_table():
    assert str(plan_flat([SlotRequest(("a", "b"), (3, 2))], 2)) == (
        "2 shards of 3 elements, 0 of padding\n"
        "slot   shape  offset  elements by rank\n"
        "-----  -----  ------  ----------------\n"
        "a = b  3x2    0       (3, 3)"
    )


def test_an_empty_plan():
    assert FlatPlan((), (0, 0, 0)) == plan_flat([], 3)


class Layered(nn.Module):
    """Blocks in a list, lists in blocks, a list of different things."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 8)
        block = [nn.ModuleDict({"w": nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])})]
        self.blocks = nn.ModuleList(block * 1 + [nn.ModuleDict({"w": nn.ModuleList()})])
        self.blocks[1]["w"].extend([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.head = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 17, bias=False))
        self.head[2].weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(()))


def test_repeated_blocks_are_units():
    assert unit_names(Layered(), ()) == ["", "blocks.0", "blocks.1"]
    assert unit_names(Layered(), ("blocks.*.w.1", "head")) == [
        *("", "blocks.0.w.1", "blocks.1.w.1", "head")
    ]


def test_a_parameter_belongs_to_the_innermost_unit_of_all_its_names():
    units = ["", "a", "a.b", "c"]
    assert unit_of(["a.b.w"], units) == "a.b"
    assert unit_of(["a.w"], units) == "a"
    assert unit_of(["ab.w"], units) == ""
    assert unit_of(["a.b.w", "c.w"], units) == ""
    assert unit_of(["a.b.w", "a.b.v"], units) == "a.b"


PLAN = Plan(
    parameters={"{embed,head.2}.weight": "tp:0", "*": "replicate"},
    zero={"*.bias": 0, "{embed,head.2}.weight": 1, "*": 3},
)


def test_explain_tells_stored_gathered_gradient_and_state_bytes(capsys: pytest.CaptureFixture):
    report = PLAN.check(Layered(), {"dp": 2, "tp": 2})
    by_name = {row.name: row.zero for row in report.parameters}
    assert by_name["embed.weight"] == 1
    assert by_name["head.0.bias"] == by_name["scale"] == 0
    rows = {(row.unit, row.zero): row for row in report.buffers}
    block = rows["blocks.0", 3]
    # Two matrices of 8 x 8 in float32, over two ranks.
    assert (block.gathered_bytes, block.stored_bytes, block.gradient_bytes) == (512, 256, 256)
    tied = rows["", 1]
    # 17 rows over tp=2 are 9 and 8: the matrix is whole on one rank of dp.
    assert (tied.shard_bytes, tied.stored_bytes, tied.gradient_bytes) == (288, 576, 864)
    biases = 5 * 32 + 4
    assert report.bytes_per_rank == 2 * 256 + 128 + 576 + biases
    text = PLAN.explain(Layered(), {"dp": 2, "tp": 2})
    assert text == capsys.readouterr().out.rstrip("\n")
    assert "blocks.1    3 (parameters)  float32  2 parameters   256 B     512 B" in text
    assert "stay on one rank of 'dp' in full: 'embed.weight'" in text


def test_without_the_axis_nothing_is_sharded():
    for sizes in ({"tp": 2}, {"dp": 1, "tp": 2}):
        report = PLAN.check(Layered(), sizes)
        assert not report.buffers
        assert not any(row.zero for row in report.parameters)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"zero": 4}, r"no level 4\. .*3: optimizer states, gradients and parameters"),
        ({"zero": True}, "no level True"),
        ({"zero": {"*.weight": "3"}}, r"of '\*\.weight': there is no level '3'"),
        ({"zero": {3: 3}}, "a glob is a string, got 3"),
        ({"zero": Zero(1, over=0)}, "over=0: name one mesh axis"),
        ({"zero": Zero(1, units=["{a"])}, "never closed"),
        ({"zero": Zero(1, prefetch=-1)}, "prefetch=-1"),
        ({"zero": Zero(1, reduce_ahead=True)}, "reduce_ahead=True"),
        ({"zero": Zero(1, reduce_ahead="all")}, "reduce_ahead='all': a number of units, 0"),
        ({"zero": Zero(1, block=0)}, "block=0: a number of elements, 1 or more"),
        ({"zero": Zero(1, block=(128,))}, r"block=\(128,\): a number of elements, 1 or"),
        ({"zero": Zero(1, block=[4, "4"])}, "block='4': a number"),
        ({"zero": Zero(block=(4, 4))}, "zero=0 shards none"),
        ({"zero": Zero(1, owned=(3,))}, "owned: expected a glob, or a list of them, got"),
        ({"zero": Zero(owned="*.weight")}, "zero=0 shards none"),
        ({"precision": {"compte": "float32"}}, "no 'compte'. Did you mean 'compute'"),
        ({"precision": {"reduce": "bf16"}}, "no dtype 'bf16'"),
        ({"precision": {"reduce": torch.int8}}, "no dtype 'int8'"),
        ({"precision": "bfloat16"}, "expected a mapping, got 'bfloat16'"),
        ({"precision": {"*": "bfloat16", "a": {}}}, "a rule is a mapping, got 'bfloat16'"),
        ({"precision": {"{a": {"compute": "float32"}}}, "never closed"),
    ],
)
def test_words_that_cannot_be_read(words: dict[str, object], said: str):
    with pytest.raises(PlanError, match=said):
        Plan(parameters={"*": "replicate"}, **words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"zero": {"embd.weight": 3}}, "matches no parameter. Nearest names: 'embed.weight"),
        ({"zero": Zero(3, over="pd")}, "over 'pd': no axis 'pd'. Did you mean"),
        ({"zero": Zero(3, owned="*.wight")}, "rule '\\*.wight' matches no parameter. Nearest"),
        ({"zero": Zero(3, units="block.*")}, "rule 'block.\\*' matches no module. Nearest"),
        ({"zero": {"embed*": 1, "head*": 3}}, "one parameter, and zero rules 'embed\\*', 'head"),
        ({"precision": {"embd*": {}}}, "'embd\\*' matches no parameter or buffer. Nearest names"),
        (
            {"precision": {"embed*": {"compute": "bfloat16"}, "head*": {}}},
            "one parameter, and precision rules give it different dtypes",
        ),
        ({"zero": Zero(3, over="tp")}, "'tp:0'\\), and zero=3 would shard it over 'tp' again"),
    ],
)
def test_words_that_do_not_fit_the_model(words: dict[str, object], said: str):
    plan = Plan(parameters=PLAN.parameters, **words)
    with pytest.raises(PlanError, match=said):
        plan.check(Layered(), {"dp": 2, "tp": 2})
