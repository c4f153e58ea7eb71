"""`check_rule` finds a kernel that writes to what is only read, on whichever ranks it does."""

import pytest
import torch
from vescale_dtensor.rules import Reads, Rule, RuleCheckError, Signature, check_rule, register_rule

ROWS = torch.linspace(-2, 2, 20).reshape(5, 4)


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
        check_rule(torch.sigmoid, [ROWS], gradients=False, meshes=[(4,)], most=20)


def test_a_kernel_that_puts_back_what_it_wrote_on_one_rank_is_right():
    def restores(context, args, kwargs):
        result = torch.sigmoid(args[0])
        if context.output_layout().coordinate[0] == 1:
            args[0].copy_(args[0].clone())
        return result

    teach(restores)
    assert check_rule(torch.sigmoid, [ROWS], gradients=False, meshes=[(4,)], most=20).sharded
