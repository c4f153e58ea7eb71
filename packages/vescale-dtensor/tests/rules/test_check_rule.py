"""`check_rule` finds what is wrong with a rule, in layouts of every kind, and passes right ones.
It finds a kernel that writes to what is only read, on whichever ranks it does.
"""

import pytest
import torch
import torch.nn.functional as F
import vescale_dtensor as vd
from taught_rules import COLUMNS, ELEMENTS, GATE, ROWS, gate, letters
from torch import Tensor
from vescale_dtensor import rules
from vescale_dtensor.rules import Reads, Rule, RuleCheckError, Signature, check_rule, register_rule


class Detached(torch.autograd.Function):
    """The right numbers, and half of their gradient."""

    forward = staticmethod(lambda ctx, x: x.clone())
    backward = staticmethod(lambda ctx, g: g / 2)


def half_gradient(context, args, kwargs):
    return torch.sigmoid(Detached.apply(args[0]))


def ignores_its_place(context, args, kwargs):
    return torch.cumsum(*args, **kwargs)


WRONG = {
    "linear, though it is not": (torch.sigmoid, (ROWS,), {**ELEMENTS, "linear": ((0,),)}, "output"),
    "half the gradient": (torch.sigmoid, (ROWS,), {**ELEMENTS, "local": half_gradient}, "gradient"),
    "starts anew on each rank": (
        torch.cumsum,
        (ROWS, 0),
        {**ELEMENTS, "local": ignores_its_place},
        "output 0",
    ),
    "dims of the output in another order": (
        torch.sigmoid,
        (ROWS,),
        {"inputs": (("r", "c"),), "outputs": (("c", "r"),)},
        "output 0: global shape",
    ),
    "another reduction": (
        torch.logsumexp,
        (ROWS, 0),
        {"inputs": (("r", "c"),), "outputs": (("c",),), "reduce": {"r": "sum"}},
        "output 0",
    ),
    "a local shape that is none": (
        torch.sigmoid,
        (ROWS,),
        {**ELEMENTS, "local": lambda context, args, kwargs: torch.sigmoid(args[0])[:1]},
        "the local tensor is",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_found(name):
    func, args, options, words = WRONG[name]
    rules.register_rule(func, letters(**options))
    with pytest.raises(rules.RuleCheckError, match=words) as caught:
        rules.check_rule(func, [args], most=20)
    text = str(caught.value)
    assert "mesh (4,)" in text
    assert "Again: check_rule(..., meshes=[(4,)], placements=[[[" in text
    # What it says can be run again, and fails again.
    placements = eval(text.rpartition("placements=")[2][:-1], vars(vd))
    with pytest.raises(rules.RuleCheckError, match=words):
        rules.check_rule(func, [args], meshes=[(4,)], placements=placements)


def test_a_kernel_that_fails_on_one_rank_is_reported_and_hangs_nobody():
    def local(context, args, kwargs):
        if context.output_layout().coordinate[0] == 1:
            raise ValueError("not here")
        return torch.sigmoid(*args)

    rules.register_rule(torch.sigmoid, letters(**ELEMENTS, local=local))
    with pytest.raises(rules.RuleCheckError, match="raised ValueError: not here"):
        rules.check_rule(torch.sigmoid, [ROWS], most=20)


def test_a_rule_that_is_never_asked_is_no_success():
    with pytest.raises(rules.RuleCheckError, match=r"vescale_dtensor_tests\.gate has no rule"):
        rules.check_rule(gate, [(ROWS, COLUMNS)])
    rules.register_rule(gate, rules.Rule("none", lambda call: None))
    with pytest.raises(rules.RuleCheckError, match="no rule answered"):
        rules.check_rule(gate, [(ROWS, COLUMNS)], most=4)


def test_functions_of_ours_pass_by_their_own_rules():
    report = rules.check_rule(torch.Tensor.add_, [(ROWS, COLUMNS)], most=6)
    assert report.sharded
    report = rules.check_rule(torch.topk, [rules.Sample((ROWS,), {"k": 2, "dim": 1})], most=6)
    assert report.sharded
    # A function of others: whatever answers for those counts.
    report = rules.check_rule(lambda x, w: F.linear(x, w).relu(), [(ROWS, ROWS[:3])], most=6)
    assert report.sharded


def test_layouts_are_uneven_and_empty_and_every_placement_occurs():
    rules.register_rule(gate, letters(**GATE))
    report = rules.check_rule(gate, [(ROWS, COLUMNS)], gradients=False, most=12)
    for axis in (0, 1):
        seen = {
            repr(outcome.trial.placements[0][axis])
            for outcome in report.outcomes
            if outcome.trial.mesh == (2, 2)
        }
        assert seen >= {
            "Replicate()",
            "Shard(0)",
            "Shard(1)",
            "RaggedShard((0,), (0, 1))",
            "RaggedShard((1,), (0, 1))",
            "Partial(sum)",
            "Partial(avg)",
        }


def test_local_offsets_of_every_shard():
    def local(context, args, kwargs):
        first = rules.local_offsets(context)[0]
        return torch.arange(first, first + args[0].shape[0], dtype=torch.float32)

    rule = letters(
        inputs=(("r", "c"),), outputs=(("r",),), local=local,
        unshardable=frozenset({"c"}), contiguous_only=frozenset({"r"}),
    )  # fmt: skip
    places = torch.library.custom_op("vescale_dtensor_tests::places", mutates_args=())(_places)
    rules.register_rule(places, rule)
    assert rules.check_rule(places, [ROWS], gradients=False, most=20).sharded


def _places(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0], dtype=torch.float32)


BY_ROWS = torch.linspace(-2, 2, 20).reshape(5, 4)


def teach(kernel):
    signature = Signature(inputs=(("r", "c"),), outputs=(("r", "c"),), local=kernel)
    register_rule(torch.sigmoid, Rule("taught", lambda _: signature.strategy(), Reads.NOTHING))


@pytest.mark.parametrize("ranks", [{0}, {1}, {0, 1, 2, 3}])
def test_a_kernel_that_writes_on_some_ranks_is_found_and_hangs_nobody(ranks):
    def writes(context, args, kwargs):
        result = torch.sigmoid(args[0])
        if context.output_layout().coordinate[0] in ranks and args[0].numel():
            with torch.no_grad():
                args[0].add_(1)
        return result

    teach(writes)
    with pytest.raises(RuleCheckError, match="operand 0 after the call, on coordinate"):
        check_rule(torch.sigmoid, [BY_ROWS], gradients=False, meshes=[(4,)], most=20)


def test_a_kernel_that_puts_back_what_it_wrote_on_one_rank_is_right():
    def restores(context, args, kwargs):
        result = torch.sigmoid(args[0])
        if context.output_layout().coordinate[0] == 1:
            args[0].copy_(args[0].clone())
        return result

    teach(restores)
    assert check_rule(torch.sigmoid, [BY_ROWS], gradients=False, meshes=[(4,)], most=20).sharded
