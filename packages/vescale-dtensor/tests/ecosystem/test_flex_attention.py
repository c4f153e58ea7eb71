"""FlexAttention of distributed tensors: refused in words, or one device's numbers.

Without gradients: torch has no backward of it on CPUs.
"""

import pytest
import torch
from on_mesh import on_mesh
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from vescale_dtensor import Shard, distribute_tensor, local_map


def causal(batch, head, row, key):
    return row >= key


pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning"),
    pytest.mark.slow,  # torch compiles it at its first call
]
WHOLE = torch.randn(4, 4, 16, 8, generator=torch.Generator().manual_seed(0))


def attend(*parts):
    mask = create_block_mask(causal, None, None, 16, 16, device="cpu")
    return flex_attention(*parts, block_mask=mask)


def on_two_ranks(dim, function):
    def program(mesh):
        return function(distribute_tensor(WHOLE, mesh, [Shard(dim)]), mesh)

    return on_mesh((2,), program)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_it_is_refused_on_every_rank(dim):
    def refused(x, mesh):
        with pytest.raises(Exception, match=r"functions of DTensors run eagerly.*local_map"):
            attend(x, x, x)
        return True

    assert on_two_ranks(dim, refused) == [True] * 2


@pytest.mark.parametrize("dim", [0, 1])
def test_batches_and_heads_in_local_map(dim):
    def mapped(x, mesh):
        places = (Shard(dim),)
        run = local_map(attend, (places,), in_placements=(places,) * 3, device_mesh=mesh)
        return run(x, x, x).full_tensor()

    for found in on_two_ranks(dim, mapped):
        torch.testing.assert_close(found, attend(WHOLE, WHOLE, WHOLE))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_run_eagerly_it_is_one_devices(dim):
    # Around all ranks, which are threads: the stance is the process's.
    with torch.compiler.set_stance("force_eager"):
        ranks = on_two_ranks(dim, lambda x, mesh: attend(x, x, x).full_tensor())
    for found in ranks:
        torch.testing.assert_close(found, attend(WHOLE, WHOLE, WHOLE))
