"""What torch's own DTensor answers wrongly, refuses or hangs on (2.11 to 2.13), answered rightly.

Each was observed or reported there; the number is the pytorch issue. What is here runs on four
processes against dense torch; ops of all kinds, over uneven, empty and partial operands in all
layouts and on all meshes, are compared with one device by `ops/test_fuzz`.

| what goes wrong there                                     | test                                 |
|-----------------------------------------------------------|--------------------------------------|
| item, float, int: the local value (144054, 166638)        | tensor/test_one_tensor               |
| max, min, amax over empty shards: a hang                  | ops/test_fuzz                        |
| uneven mean (162692); losses with a mean over uneven rows | ops/test_fuzz                        |
| uneven view, unflatten (143372, 179502, 186282)           | ops/test_fuzz                        |
| uneven pieces in and out (144109, 161368, 103306)         | test_layouts                         |
| in place with another layout: refused                     | ops/test_fuzz                        |
| nonzero, x[mask], unique, cdist: refused                  | ops/test_fuzz                        |
| plain tensors mixed in: refused                           | ops/test_fuzz                        |
| slices, sort, topk, cumsum along the cut dim: replicated  | ops/test_fuzz, ops/test_costs        |
| partial sums in pointwise ops (183363, 165962)            | ops/test_fuzz, test_partial_operands |
| a number or a list served from a stale cache              | here                                 |
| (153603, 147180, 168255, 174422, register_sharding)       |                                      |
| operands cut in other orders of axes (166598)             | ops/test_fuzz                        |
| local_map of uneven pieces (172812)                       | test_local_map                       |
| the wrong layout in a convolution's backward (191926)     | ops/test_fuzz                        |
| random numbers of uneven shards (168058, 138329, 189546)  | test_layouts, test_attention_rows    |
| clipping over several meshes (180346)                     | here                                 |
| a placement's subclass equals its base                    | tensor/test_one_tensor               |
| caches that grow with every new number (178276)           | test_soak                            |
| gradients that owe a sum are not visible as such          | test_gradients_of_programs           |
| padding on the wire                                       | redistribute/test_plans              |
"""

import pytest
import torch
import torch.nn.functional as F
import vescale_dtensor as vd
from vescale_comm.testing import device_mesh, on_ranks
from vescale_dtensor import Partial, Replicate, Shard


@on_ranks(4)
def test_clipping_over_two_meshes_names_both():
    parameters = []
    for sizes, layout in (((4,), [Shard(0)]), ((2, 2), [Shard(0), Shard(1)])):
        mesh = device_mesh(sizes, ("dp", "tp")[: len(sizes)])
        laid = vd.distribute_tensor(torch.ones(4, 4), mesh, layout)
        parameters.append(torch.nn.Parameter(laid))
        parameters[-1].grad = laid
    with pytest.raises(vd.MeshError, match=r"dp=4.*dp=2, tp=2"):
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)


def drawn(x, count):
    torch.manual_seed(0)
    return torch.multinomial(x.abs(), count)


NUMBERS = (
    lambda x, n: x * n,
    lambda x, n: x.clamp(-1, n + 3),
    lambda x, n: x.sum(int(n) % 2),
    lambda x, n: F.elu(x, n),
    lambda x, n: F.leaky_relu(x, float(n)),
)
COUNTS = (
    lambda x, n: torch.stack([x] * n),
    lambda x, n: torch.cat([x] * n, -1),
    lambda x, n: x.topk(n).values,
    drawn,
)
CALLS = [
    (NUMBERS, (2, 2.0, 3, -1, -2, True, 0.5)),  # hash(-1) == hash(-2)
    (COUNTS, (1, 2, 3)),
    ([lambda x, sizes: torch.cat([x.split(sizes)[1], x])], ([2, 5], [5, 2], [1, 6])),
]


@on_ranks(4)
def test_arguments_are_never_those_of_an_earlier_call():
    mesh, dense = device_mesh((4,), ("dp",)), torch.linspace(-1, 2, 42).sin().view(7, 6)
    for placement in (Shard(0), Shard(1), Partial()):
        laid = vd.distribute_tensor(dense, mesh, [Replicate()]).redistribute(mesh, [placement])
        for functions, numbers in CALLS:
            for function in functions:
                for number in numbers:
                    found, wanted = function(laid, number), function(dense, number)
                    assert found.shape == wanted.shape
                    torch.testing.assert_close(found.full_tensor(), wanted)
