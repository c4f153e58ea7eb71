"""FlexAttention of distributed tensors: refused in words, or one device's numbers.

Without gradients: torch has no backward of it on CPUs.
"""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from vescale_comm import simulate
from vescale_dtensor import Shard, distribute_tensor, init_device_mesh, local_map


def causal(batch, head, row, key):
    return row >= key


@pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")
@pytest.mark.slow  # torch compiles it at its first call
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_flex_attention(dim):
    mask = create_block_mask(causal, None, None, 16, 16, device="cpu")
    torch.manual_seed(0)
    whole = torch.randn(4, 4, 16, 8)
    wanted = flex_attention(whole, whole, whole, block_mask=mask)

    def program(rank, world_size):
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(whole, mesh, [Shard(dim)])
        with pytest.raises(Exception, match=r"functions of DTensors run eagerly.*local_map"):
            flex_attention(x, x, x, block_mask=mask)
        with torch.compiler.set_stance("force_eager"):
            found = [flex_attention(x, x, x, block_mask=mask).full_tensor()]
        if dim < 2:  # a rank has all of the sequence

            def attend(*parts):
                return flex_attention(*parts, block_mask=mask)

            places = (Shard(dim),)
            mapped = local_map(attend, (places,), in_placements=(places,) * 3, device_mesh=mesh)
            found.append(mapped(x, x, x).full_tensor())
        return found

    for each in simulate(2).run(program):
        for found in each:
            torch.testing.assert_close(found, wanted)
