"""What torch's own DTensor answers wrongly, refuses or hangs on (2.11 to 2.13), answered rightly.

Each case is one that was observed or reported there; the number in a comment is the pytorch issue.
All run on four processes against dense torch, on a mesh of 4 or of 2 x 2.

| what goes wrong there                                     | case here, or test                   |
|-----------------------------------------------------------|--------------------------------------|
| item, float, int: the local value (144054, 166638)        | test_semantics                       |
| max, min, amax over empty shards: a hang                  | reductions_over_empty_shards         |
| uneven mean (162692); losses with a mean over uneven rows | means_…; losses_with_a_mean…         |
| uneven view, unflatten (143372, 179502, 186282)           | views_that_do_not_divide             |
| uneven pieces in and out (144109, 161368, 103306)         | test_layouts                         |
| in place with another layout: refused                     | in_place_ops_that_would_change…      |
| nonzero, x[mask], unique, cdist: refused                  | shapes_that_depend_on_data           |
| plain tensors mixed in: refused                           | plain_tensors_and_numbers_mixed_in   |
| slices, sort, topk, cumsum along the cut dim: replicated  | ops_along_the_sharded_dim            |
| partial sums in pointwise ops (183363, 165962)            | algebra_of_partial_sums              |
| a number or a list served from a stale cache              | arguments_are_never_those_of_an…     |
| (153603, 147180, 168255, 174422, register_sharding)       |                                      |
| operands cut in other orders of axes (166598)             | matrix_products_whose_operands…      |
| local_map of uneven pieces (172812)                       | test_ecosystem_local_map             |
| the wrong layout in a convolution's backward (191926)     | convolution_backward                 |
| random numbers of uneven shards (168058, 138329, 189546)  | test_layouts, test_attention_rows    |
| clipping over several meshes (180346)                     | clipping_over_two_meshes_names_both  |
| a placement's subclass equals its base                    | test_semantics                       |
| caches that grow with every new number (178276)           | test_soak                            |
| gradients that owe a sum are not visible as such          | test_gradients                       |
| padding on the wire                                       | test_redistribution_plans            |
"""

import pytest
import torch
import torch.nn.functional as F
import vescale_dtensor as vd
from named_cases import named_cases
from vescale_comm.testing import device_mesh, run
from vescale_dtensor import Partial, Replicate, Shard

CASES, case = named_cases()


def line():
    return device_mesh((4,), ("dp",))


def put(tensor, *placements, grad=False):
    mesh = line() if len(placements) == 1 else device_mesh((2, 2), ("dp", "tp"))
    leaf = tensor.clone().requires_grad_(grad)
    return vd.distribute_tensor(leaf, mesh, list(placements), src_data_rank=None)


def same(ours, dense, **tolerance):
    whole = ours.full_tensor() if isinstance(ours, vd.DTensor) else ours
    assert tuple(ours.shape) == tuple(dense.shape)
    torch.testing.assert_close(whole, dense, **tolerance)


def data(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@case
def reductions_over_empty_shards():  # a hang
    dense = data(2, 3)
    x = put(dense, Shard(0))
    for reduce in (torch.max, torch.min, torch.amax, torch.amin, torch.prod, torch.std):
        same(reduce(x), reduce(dense))
    for reduce in (torch.argmax, torch.mean, torch.var):
        same(reduce(x), reduce(dense))
    for dim in (0, 1):
        same(x.amax(dim), dense.amax(dim))
        same(x.max(dim).values, dense.max(dim).values)
        same(x.max(dim).indices, dense.max(dim).indices)
        same(torch.logsumexp(x, dim), torch.logsumexp(dense, dim))
    assert bool((x < 10).all())
    assert not bool((x > 10).any())


@case
def means_variances_and_norms_over_uneven_shards():  # 162692
    dense = data(7, 5)
    for placements in ([Shard(0)], [Shard(1)], [Shard(0), Shard(1)], [Shard(0), Shard(0)]):
        x = put(dense, *placements)
        same(x.mean(), dense.mean())
        same(x.mean(0), dense.mean(0))
        same(x.var(0), dense.var(0))
        same(x.std(), dense.std())
        same(torch.linalg.vector_norm(x), torch.linalg.vector_norm(dense))
        same(x.norm(), dense.norm())


@case
def views_that_do_not_divide():  # 143372, 179502
    dense = data(7, 6)
    for placements in ([Shard(0)], [Shard(1)], [Shard(0), Shard(1)], [Shard(1), Shard(0)]):
        x = put(dense, *placements, grad=True)
        for reshape in (
            lambda t: t.view(-1),
            lambda t: t.reshape(6, 7),
            lambda t: t.unflatten(1, (2, 3)),
            lambda t: t.unflatten(1, (3, 2)).transpose(0, 1).flatten(1),
            lambda t: t.view(1, 7, 1, 6).squeeze(),
        ):
            plain = dense.clone().requires_grad_()
            same(reshape(x), reshape(dense))
            x.grad = None
            weights = data(42, seed=1)
            (reshape(x).reshape(-1) * weights).sum().backward()
            (reshape(plain).reshape(-1) * weights).sum().backward()
            same(x.grad, plain.grad)


@case
def in_place_ops_that_would_change_the_layout():
    dense = data(7, 6)
    index, source = torch.tensor([5, 0, 3]), data(3, 6, seed=1)
    x, plain = put(dense, Shard(0)), dense.clone()
    same(x.index_put_((index,), source), plain.index_put_((index,), source))
    same(x.index_copy_(0, index, source), plain.index_copy_(0, index, source))
    rows = index[:, None].expand(3, 6)
    same(x.scatter_(0, rows, source), plain.scatter_(0, rows, source))
    same(x, plain)
    partial = vd.DTensor.from_local(dense.clone(), line(), [Partial()])
    torch.manual_seed(0)
    partial.normal_()
    torch.manual_seed(0)
    same(partial, torch.empty(7, 6).normal_())


@case
def shapes_that_depend_on_data():
    dense = data(7, 6)
    x = put(dense, Shard(0), Shard(1))
    same(x.nonzero(), dense.nonzero())
    same(x[x > 0], dense[dense > 0])
    same(torch.masked_select(x, x > 0), torch.masked_select(dense, dense > 0))
    same(torch.unique((x * 2).round()), torch.unique((dense * 2).round()))
    same(torch.cdist(x, x), torch.cdist(dense, dense))


@case
def plain_tensors_and_numbers_mixed_in():
    dense = data(7, 6)
    x = put(dense, Shard(0))
    same(x + dense, dense + dense)
    same(torch.where(dense > 0, x, 0.0), torch.where(dense > 0, dense, 0.0))
    same(x @ data(6, 3), dense @ data(6, 3))
    same(1.0 - x, 1.0 - dense)


@case
def ops_along_the_sharded_dim():
    dense = data(7, 6)
    x = put(dense, Shard(0))
    same(x.cumsum(0), dense.cumsum(0))
    same(x.sort(0).values, dense.sort(0).values)
    same(x.topk(3, 0).values, dense.topk(3, 0).values)
    same(x.flip(0), dense.flip(0))
    same(x.roll(2, 0), dense.roll(2, 0))
    same(x[1:6], dense[1:6])
    same(x[::2], dense[::2])
    same(x[3], dense[3])
    same(x[-1, 2], dense[-1, 2])


@case
def algebra_of_partial_sums():
    terms = [data(4, seed=i) for i in range(4)]
    dense = sum(terms)
    p = vd.DTensor.from_local(terms[torch.distributed.get_rank()], line(), [Partial()])
    for f in (
        lambda t: t + 1,
        lambda t: t * t,
        lambda t: t.relu(),
        lambda t: t / t,
        lambda t: t * -1,
        lambda t: 1 / t,
        lambda t: torch.addcmul(t, t, t, value=2.0),
        lambda t: t - 2 * t,
        lambda t: t + dense,
        lambda t: torch.stack([t, t]).sum(0),
    ):
        same(f(p), f(dense))


@case
def losses_with_a_mean_over_uneven_rows():
    logits, target = data(7, 5), torch.tensor([0, 4, -100, 2, 1, 3, 0])
    for placements in ([Shard(0)], [Shard(1)], [Shard(0), Shard(1)]):
        for reduction in ("mean", "sum", "none"):
            x, plain = put(logits, *placements, grad=True), logits.clone().requires_grad_()
            ours = F.cross_entropy(x, target, reduction=reduction)
            dense = F.cross_entropy(plain, target, reduction=reduction)
            same(ours, dense)
            ours.sum().backward()
            dense.sum().backward()
            same(x.grad, plain.grad)
    x, y = put(data(7, 5), Shard(0)), put(data(7, 5, seed=1), Shard(0))
    same(F.mse_loss(x, y), F.mse_loss(data(7, 5), data(7, 5, seed=1)))
    same(F.smooth_l1_loss(x, y), F.smooth_l1_loss(data(7, 5), data(7, 5, seed=1)))


@case
def matrix_products_whose_operands_are_sharded_in_other_orders():  # 166598
    a, b = data(8, 8), data(8, 8, seed=1)
    for left in ([Shard(0), Shard(0)], [Shard(1), Shard(1)], [Shard(1), Shard(0)]):
        for right in ([Shard(0), Shard(0)], [Shard(1), Shard(0)], [Replicate(), Shard(0)]):
            same(put(a, *left) @ put(b, *right), a @ b, rtol=1e-5, atol=1e-5)


@case
def a_padding_row_and_a_split_vocabulary():
    table, index = data(7, 3), torch.tensor([[0, 6, 2], [5, 5, 1]])
    for placements in ([Shard(0)], [Shard(1)], [Shard(0), Shard(1)]):
        ours, plain = put(table, *placements, grad=True), table.clone().requires_grad_()
        F.embedding(index, ours, padding_idx=5).square().sum().backward()
        F.embedding(index, plain, padding_idx=5).square().sum().backward()
        same(ours.grad, plain.grad)


@case
def convolution_backward():  # 191926
    x, w = data(4, 3, 8, 8), data(5, 3, 3, 3, seed=1)
    ours_x, ours_w = put(x, Shard(0), grad=True), put(w, Replicate(), grad=True)
    plain_x, plain_w = x.clone().requires_grad_(), w.clone().requires_grad_()
    F.conv2d(ours_x, ours_w, padding=1).square().sum().backward()
    F.conv2d(plain_x, plain_w, padding=1).square().sum().backward()
    same(ours_x.grad, plain_x.grad, rtol=1e-4, atol=1e-4)
    same(ours_w.grad, plain_w.grad, rtol=1e-4, atol=1e-4)


@case
def clipping_over_two_meshes_names_both():  # 180346
    grads = [put(data(4, 4), Shard(0)), put(data(4, 4), Shard(0), Shard(1))]
    parameters = [torch.nn.Parameter(g) for g in grads]
    for parameter, gradient in zip(parameters, grads, strict=True):
        parameter.grad = gradient
    with pytest.raises(vd.MeshError, match=r"dp=4.*dp=2, tp=2"):
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)


@case
def arguments_are_never_those_of_an_earlier_call():  # 153603, 147180, 168255, 174422
    dense = data(7, 6)
    for placement in (Shard(0), Shard(1), Partial()):
        kept = placement if placement != Partial() else Replicate()
        x = put(dense, kept)
        if placement == Partial():
            x = x.redistribute(placements=[placement])
        for number in (2, 2.0, 3, -1, -2, True, 0.5):  # hash(-1) == hash(-2)
            same(x * number, dense * number)
            same(x.clamp(-1, number + 3), dense.clamp(-1, number + 3))
            same(x.sum(int(number) % 2), dense.sum(int(number) % 2))
            same(F.elu(x, number), F.elu(dense, number))
            same(F.leaky_relu(x, float(number)), F.leaky_relu(dense, float(number)))
        for sizes in ([2, 5], [5, 2], [1, 6]):
            for mine, one in zip(x.split(sizes), dense.split(sizes), strict=True):
                same(mine, one)
        for count in (1, 2, 3):
            same(torch.stack([x] * count), torch.stack([dense] * count))
            same(torch.cat([x] * count, -1), torch.cat([dense] * count, -1))
            same(x.topk(count).values, dense.topk(count).values)
            torch.manual_seed(0)
            drawn = torch.multinomial(x.abs(), count)
            torch.manual_seed(0)
            same(drawn, torch.multinomial(dense.abs(), count))


def run_case(rank, world, name):
    CASES[name]()


@pytest.mark.parametrize("name", CASES)
def test_known_wrong_answers(name):
    run(run_case, 4, name)
