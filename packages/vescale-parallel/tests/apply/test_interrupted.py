"""A forward that Ctrl-C ends leaves the model as it was, wherever in it that was."""

from typing import Any

import pytest
import torch
from program_ways import adam, batch, distributed, interrupted, make, trained, values
from torch import nn
from torch.optim import optimizer as torch_optimizer
from vescale_comm import simulate
from vescale_dtensor import attention_way
from vescale_parallel import Plan, parallelize, through_forward
from vescale_parallel import mesh as make_mesh
from zero_models import schedule_of


def interrupt(*args: Any) -> None:
    raise KeyboardInterrupt


def is_as_before(model: nn.Module) -> bool:
    """Whether modules hold the leaves, nothing is gathered, and nobody's hooks are left."""
    zero = schedule_of(model)
    left = any(one.depth or one.is_swapped for one in zero.units) or zero._saved
    return not left and zero.gathered_bytes == 0 and all(p.is_leaf for p in model.parameters())


def in_a_block_by_itself(model: nn.Module) -> None:
    block: Any = model.blocks[1]
    interrupted(model, "forward", lambda: block(torch.ones(2, 6)))


def in_another_method(model: nn.Module) -> None:
    interrupted(model, "forward", lambda: through_forward(model, "forward", *batch(0)))


def within_a_block_that_is_computed_again(model: nn.Module) -> None:
    interrupted(model, "backward", lambda: model(*batch(0)).backward())


def in_a_hook_behind_ours(module: nn.Module, call: Any) -> None:
    hook = module.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        call()
    hook.remove()


def test_nothing_is_left_behind():
    def on_a_rank(rank: int, world_size: int) -> None:
        model = distributed(make(), "zero3")
        optimizer = adam(model)
        expected = values(model)
        for end in (in_a_block_by_itself, in_another_method, within_a_block_that_is_computed_again):
            end(model)
            assert is_as_before(model)
        # Where a hook of the model itself was interrupted, at the next forward.
        in_a_hook_behind_ours(model.blocks[1], lambda: model(*batch(0)))
        assert is_as_before(model)
        in_a_hook_behind_ours(model, lambda: model(*batch(0)))
        model(*batch(0)).backward()
        assert is_as_before(model)
        assert values(model) == expected
        trained(model, optimizer, 1)
        assert values(model) != expected

    simulate(2).run(on_a_rank)


def test_attention_is_computed_as_before():
    def on_a_rank(rank: int, world_size: int) -> None:
        plan = Plan(batch="dp:1", axes=("dp",), sequence="gather")
        model = parallelize(make(), make_mesh(device_type="cpu", dp=2), plan)
        interrupted(model, "forward", lambda: model(*batch(0)))
        assert attention_way() == "auto"
        in_a_block_by_itself(model)
        assert attention_way() == "auto"

    simulate(2).run(on_a_rank)


def test_models_leave_no_hooks_on_all_optimizers():
    def on_a_rank(rank: int, world_size: int) -> None:
        distributed(make(), "zero3")

    def count() -> int:
        before = torch_optimizer._global_optimizer_pre_hooks
        return len(before) + len(torch_optimizer._global_optimizer_post_hooks)

    simulate(2).run(on_a_rank)
    known = count()
    for _ in range(2):
        simulate(2).run(on_a_rank)
    assert count() == known
