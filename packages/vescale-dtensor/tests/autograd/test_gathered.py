"""A gathered parameter computes like the whole one, and its gradient arrives as a contribution."""

import pytest
import torch
import vescale_dtensor as vd
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from vescale_comm import trace
from vescale_comm.testing import device_mesh, on_ranks
from vescale_dtensor import DTensor, LayoutError, Partial, RaggedShard, Replicate, Shard, storage


class Sum(torch.autograd.Function):
    """Hands out the whole values, and adds up this rank's share of the contributions."""

    @staticmethod
    def forward(ctx, leaf: Tensor, whole: Tensor, group: object, slice_: slice) -> Tensor:
        ctx.group, ctx.slice_ = group, slice_
        return whole.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor):
        total = gradient.clone()
        torch.distributed.all_reduce(total, group=ctx.group)
        return total.flatten()[ctx.slice_], None, None, None


def stored_and_whole(mesh: DeviceMesh) -> tuple[DTensor, DTensor]:
    """A parameter cut flat over dp on the transposed mesh, and its gathered values on `mesh`."""
    transposed = DeviceMesh("cpu", mesh.mesh.T.contiguous(), mesh_dim_names=("tp", "dp"))
    dense = torch.arange(24.0).reshape(6, 4) / 24
    flat = RaggedShard((0, 1), (7, 5))
    placements = [Shard(0), flat]
    stored = vd.distribute_tensor(dense, transposed, placements, src_data_rank=None)
    stored.requires_grad_()
    local = dense[mesh.get_local_rank("tp") * 3 :][:3]
    own = slice(0, 7) if mesh.get_local_rank("dp") == 0 else slice(7, 12)
    leaf = storage.local_leaf(stored)
    assert torch.equal(leaf.detach(), local.flatten()[own])
    whole = Sum.apply(leaf, local, mesh.get_group("dp"), own)
    return stored, storage.gathered(stored, whole, mesh, [Replicate(), Shard(0)])


@on_ranks(4)
def test_uses_that_vary_and_uses_that_do_not():
    mesh = device_mesh((2, 2), ("dp", "tp"))
    dense = (torch.arange(24.0).reshape(6, 4) / 24).requires_grad_()
    x = torch.linspace(-1, 1, 20).reshape(5, 4)
    loss = (x @ dense.t()).square().sum() + dense.sin().sum()
    loss.backward()
    stored, whole = stored_and_whole(mesh)
    assert whole.shape == (6, 4)
    assert whole.placements == (Replicate(), Shard(0))
    rows = vd.distribute_tensor(x, mesh, [Shard(0), Replicate()])
    # The product varies over dp, the sine does not: both reach one node, unsummed.
    with trace(torch=True) as seen:
        found = (rows @ whole.t()).square().sum() + whole.sin().sum()
        found.backward()
    torch.testing.assert_close(found.full_tensor(), loss.detach())
    torch.testing.assert_close(stored.grad.full_tensor(), dense.grad)
    assert "all_gather" not in seen.counts()


class Unit(torch.autograd.Function):
    """Hands out the aliases of many parameters, and adds up the contributions of each."""

    @staticmethod
    def forward(ctx, gathering: storage.Gathering, wholes: list[Tensor], mesh: DeviceMesh, *leaves):
        ctx.set_materialize_grads(False)
        ctx.gathering, ctx.mesh = gathering, mesh
        return tuple(gathering.aliases(wholes))

    @staticmethod
    def backward(ctx, *cotangents: Tensor | None):
        found = []
        for gradient in ctx.gathering.contributions(cotangents):
            if gradient is not None:
                gradient = gradient.clone()
                torch.distributed.all_reduce(gradient, group=ctx.mesh.get_group("dp"))
                gradient = gradient.chunk(2)[ctx.mesh.get_local_rank("dp")]
            found.append(gradient)
        return None, None, None, *found


@on_ranks(4)
def test_many_parameters_share_one_node():
    mesh = device_mesh((2, 2), ("dp", "tp"))
    dense = [(torch.arange(8.0).reshape(4, 2) + k).requires_grad_() for k in range(4)]
    stored = [
        vd.distribute_tensor(one.detach(), mesh, [Shard(0), Replicate()]).requires_grad_()
        for one in dense
    ]
    x = torch.linspace(-1, 1, 20).reshape(10, 2)

    def loss(x: Tensor, weights: list[Tensor]) -> Tensor:
        a, b, c, _ = weights
        # The first varies, the second does not, the third does both, the last is not used.
        return (x @ a.t()).square().sum() + b.sin().sum() + (x @ c.t()).sum() * c.cos().sum()

    expected = loss(x, dense)
    expected.backward()
    gathering = storage.Gathering(stored, mesh, [[Replicate(), Replicate()]] * 4)
    wholes = [one.detach() for one in dense]
    aliases = Unit.apply(gathering, wholes, mesh, *storage.local_leaves(stored))
    rows = vd.distribute_tensor(x, mesh, [Shard(0), Replicate()])
    found = loss(rows, gathering.wrapped(aliases))
    found.backward()
    torch.testing.assert_close(found.full_tensor(), expected.detach())
    with trace() as seen:
        storage.reduce_gradients(stored)
    # Partial over tp, where the stored parameters are replicated, until that was asked for.
    assert {record.axes for record in seen.records} == {("tp",)}
    for one, other in zip(stored[:3], dense, strict=False):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad)
    assert stored[3].grad is None
    with pytest.raises(LayoutError, match="gives this rank the shape"):
        gathering.aliases([torch.ones(3, 2)] * 4)


@on_ranks(4)
def test_the_gradient_is_partial_where_the_parameter_is_replicated():
    mesh = device_mesh((2, 2), ("dp", "tp"))
    dense = torch.ones(4, requires_grad=True)
    x = torch.arange(12.0).reshape(3, 4)
    (x * dense).square().sum().backward()
    stored = vd.distribute_tensor(torch.ones(4), mesh, [Replicate(), Replicate()])
    stored.requires_grad_()
    value = storage.local_leaf(stored) * 1
    whole = storage.gathered(stored, value, mesh, [Replicate(), Replicate()])
    assert storage.gathered(stored, value.detach(), mesh, [Replicate()] * 2).requires_grad is False
    (vd.distribute_tensor(x, mesh, [Shard(0), Shard(1)]) * whole).square().sum().backward()
    # Partial on both axes, until the total is asked for.
    assert stored.grad.placements == (Partial("sum"), Partial("sum"))
    torch.testing.assert_close(vd.gradient_total(stored).full_tensor(), dense.grad)


@on_ranks(2)
def test_what_cannot_be_gathered_is_refused():
    mesh = device_mesh((2,), ("dp",))
    stored = vd.distribute_tensor(torch.ones(4), mesh, [Shard(0)]).requires_grad_()
    with pytest.raises(LayoutError, match="gives this rank the shape"):
        storage.gathered(stored, torch.ones(3), mesh, [Replicate()])
    with pytest.raises(LayoutError, match="are not whole"):
        storage.gathered(stored, torch.ones(4), mesh, [Partial("sum")])
    with pytest.raises(vd.DTensorError, match="is not a leaf"):
        storage.local_leaf(stored * 2)
    with pytest.raises(RuntimeError, match="without a history"):
        storage.before_backward(stored, print)


@on_ranks(2)
def test_a_call_before_backward_needs_no_gradient():
    mesh = device_mesh((2,), ("dp",))
    stored = vd.distribute_tensor(torch.ones(4), mesh, [Shard(0)]).requires_grad_()
    events: list[str] = []
    product = stored * 2
    handle = storage.before_backward(product, lambda: events.append("product"))
    storage.before_backward(stored.full_tensor() * 3, lambda: events.append("elsewhere"))
    with trace() as seen:
        product.sum().backward()
    assert events == ["product"]
    assert seen.counts() == {}
    handle.remove()
    assert not storage.written_unseen(stored)
    stored.to_local()
    assert storage.written_unseen(stored)
    other = vd.distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    assert not storage.written_unseen(other)
    other.data = vd.distribute_tensor(torch.zeros(4), mesh, [Shard(0)])
    assert storage.written_unseen(other)


def test_a_call_before_backward_of_a_view_that_is_written_to():
    x, weight = torch.ones(2, 3, 4), torch.ones(4, 4, requires_grad=True)
    bias = torch.ones(4, requires_grad=True)
    for write in (lambda y: y, lambda y: y.add_(x), lambda y: y[:1].mul_(2)):
        product = torch.nn.functional.linear(x.flatten(0, 1), weight, bias).view(2, 3, 4)
        assert product._is_view()  # as that of three dims is up to torch 2.14
        events: list[str] = []
        product._base.grad_fn.register_prehook(lambda _, events=events: events.append("product"))
        handle = storage.before_backward(product, lambda events=events: events.append("reached"))
        write(product)
        for _ in range(2):
            events.clear()
            product.sum().backward(retain_graph=True)
            assert events.count("reached") == 1
            assert events.index("reached") <= events.index("product") + 1
        handle.remove()
        events.clear()
        product.sum().backward()
        assert "reached" not in events


def test_what_is_no_leaf_is_named_without_its_values():
    """A parameter of a model printed pages of numbers, and said nothing of what to do."""

    plain = torch.nn.Parameter(torch.ones(64, 64))
    for call in (storage.local_leaf, lambda one: storage.local_leaves([one])):
        with pytest.raises(vd.DTensorError, match=r"a Parameter of shape \(64, 64\)") as told:
            call(plain)
        assert len(str(told.value)) < 300
