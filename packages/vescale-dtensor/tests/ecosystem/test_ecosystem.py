"""A script for torch.distributed.tensor moves over by its import: what it makes is what one device
makes, and tensors convert both ways without a copy. Names and signatures: `test_parity`.
"""

from inspect import signature

import pytest
import torch
import torch.distributed.tensor as stock
import vescale_dtensor as vd
from named_cases import named_cases
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from vescale_comm import trace
from vescale_comm.testing import device_mesh, on_ranks
from vescale_dtensor import LayoutError, Partial, RaggedShard, Replicate, Shard, UnsupportedError


@pytest.mark.parametrize("kind", ["Placement", "Shard", "Replicate", "Partial"])
def test_placements_have_what_is_asked_of_them(kind):
    theirs = getattr(stock, kind)
    asked = {"is_partial", "is_replicate", "is_shard", "dim", "reduce_op"}
    made = {"Shard": vd.Shard(1), "Replicate": vd.Replicate(), "Partial": vd.Partial()}
    ours = made.get(kind, vd.Placement)
    assert {n for n in asked if hasattr(theirs, n)} <= {n for n in asked if hasattr(ours, n)}


CASES, case = named_cases()
ASKED = {"preserve_rank_order": True}


LAYOUTS = [
    (Shard(0), Shard(1)),
    (Shard(0), Shard(0)),
    (Replicate(), Shard(1)),
    (Partial(), Shard(0)),
    (Replicate(), Partial("avg")),
]


@case
def factories_make_what_one_device_makes(mesh):
    for placements in LAYOUTS:
        on = {"device_mesh": mesh, "placements": placements}
        for shape in [(5, 3), (4, 4), (1, 2)]:
            for made, whole in [
                (vd.zeros(*shape, **on), torch.zeros(shape)),
                (vd.ones(shape, dtype=torch.float64, **on), torch.ones(shape).double()),
                (vd.full(shape, 7, **on), torch.full(shape, 7)),
                (vd.full(shape, 2.5, **on), torch.full(shape, 2.5)),
            ]:
                assert made.placements == placements
                assert made.dtype == whole.dtype
                assert made.shape == whole.shape
                if whole.is_floating_point() or "avg" not in str(placements):
                    assert torch.equal(made.full_tensor(), whole), (placements, shape)
            assert vd.empty(shape, **on).shape == shape


@case
def random_factories_draw_what_one_device_draws(mesh):
    for placements in LAYOUTS[:4]:
        on = {"device_mesh": mesh, "placements": placements}
        for shape in [(5, 3), (40, 5), (1, 2)]:
            torch.manual_seed(1)
            ours = [
                vd.rand(shape, **on),
                vd.randn(*shape, **on),
                vd.randint(3, 9, shape, **on),
                vd.randint(9, shape, **on),
                vd.randn(shape, dtype=torch.float64, **on),
            ]
            ours = [t.full_tensor() for t in ours] + [torch.rand(2)]
            torch.manual_seed(1)
            whole = [torch.rand(shape), torch.randn(shape), torch.randint(3, 9, shape)]
            whole += [torch.randint(9, shape), torch.randn(shape, dtype=torch.float64)]
            assert all(map(torch.equal, ours, [*whole, torch.rand(2)])), (placements, shape)


@case
def ranges_are_those_of_one_device(mesh):
    for arguments in [(10,), (2, 9), (9, 2, -3), (0, 3, 0.5), (1.0, 400.0, 0.1), (0,), (1, 2, 7)]:
        for placement in (Shard(0), Replicate(), RaggedShard((0,), (1, 1))):
            if isinstance(placement, RaggedShard) and len(torch.arange(*arguments)) % 2:
                continue
            made = vd.arange(*arguments, device_mesh=mesh, placements=[placement, Replicate()])
            assert torch.equal(made.full_tensor(), torch.arange(*arguments)), arguments
    assert vd.arange(4, dtype=torch.float16, device_mesh=mesh).dtype == torch.float16
    with pytest.raises(LayoutError, match="step"):
        vd.arange(3, 1, device_mesh=mesh)


@case
def spaced_numbers_are_those_of_one_device(mesh):
    ranges = [(0, 1, 7), (-2.5, 3, 40), (3, 3, 1), (5, -5, 0), (1e-3, 1e4, 1001)]
    layouts = [(Shard(0), Shard(0)), (Replicate(), Shard(0)), (Partial(), Replicate())]
    for placements in [*layouts, (vd.InterleavedShard(0, 2), Replicate())]:
        on = {"device_mesh": mesh, "placements": placements}
        for start, end, steps in ranges:
            if isinstance(placements[0], vd.InterleavedShard) and steps % 4:
                continue
            found = vd.linspace(start, end, steps, **on)
            assert torch.equal(found.full_tensor(), torch.linspace(start, end, steps))
            found = vd.logspace(start / 1e4, end / 1e4, steps, 2.5, **on)
            assert found.placements == placements
            whole = torch.logspace(start / 1e4, end / 1e4, steps, 2.5)
            assert torch.equal(found.full_tensor(), whole)
    ends = torch.tensor(1.5), vd.full((), 4, device_mesh=mesh)
    found = vd.linspace(*ends, 5, dtype=torch.float64, device_mesh=mesh, requires_grad=True)
    assert torch.equal(found.full_tensor(), torch.linspace(1.5, 4, 5, dtype=torch.float64))
    assert found.requires_grad
    assert found.is_leaf
    assert vd.linspace(0, 4, 5, dtype=torch.int32, device_mesh=mesh).dtype == torch.int32
    assert vd.linspace(0, 1j, 3, device_mesh=mesh).dtype == torch.complex64
    with pytest.raises(LayoutError, match="tensors of no dims"):
        vd.logspace(torch.ones(2), 3, 4, device_mesh=mesh)
    with pytest.raises(LayoutError, match="negative"):
        vd.linspace(0, 1, -1, device_mesh=mesh)


@case
def factories_hold_a_piece_and_follow_the_mesh_that_is_open(mesh):
    with trace() as traced:
        made = vd.zeros(8, 4, device_mesh=mesh, placements=[Shard(0), Shard(1)])
        assert made.to_local().shape == (4, 2)
        assert made.to_local().untyped_storage().nbytes() == 32
    assert traced.counts() == {}
    with mesh:
        assert vd.rand(4, requires_grad=True).requires_grad
        assert vd.DTensor.from_local(torch.ones(2)).device_mesh is mesh
        assert vd.distribute_tensor(torch.ones(2)).device_mesh is mesh
    with pytest.raises(vd.MeshError, match="zeros: no device_mesh"):
        vd.zeros(3)
    with pytest.raises(UnsupportedError, match="strided"):
        vd.zeros(3, device_mesh=mesh, layout=torch.sparse_coo)
    with pytest.raises(LayoutError, match="negative"):
        vd.zeros(-1, device_mesh=mesh)


@case
def modules_are_distributed_as_torch_does(mesh):
    def column_wise(name, module, mesh):
        if isinstance(module, nn.Linear):
            sharded = vd.distribute_tensor(module.weight, mesh, [Replicate(), Shard(0)])
            module.weight = nn.Parameter(sharded)

    def enter(module, inputs, mesh):
        return tuple(vd.distribute_tensor(x, mesh, [Shard(0), Replicate()]) for x in inputs)

    def leave(module, outputs, mesh):
        return outputs.full_tensor()

    torch.manual_seed(torch.distributed.get_rank())  # replicated parameters come from one rank
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 6))
    model[2].bias.requires_grad_(False)
    model[3].bias = model[2].bias
    assert vd.distribute_module(model, mesh, column_wise, enter, leave) is model
    assert all(isinstance(t, vd.DTensor) for t in (*model.parameters(), *model.buffers()))
    assert model[0].weight.placements == (Replicate(), Shard(0))
    assert model[1].running_mean.placements == (Replicate(), Replicate())
    assert model[3].bias is model[2].bias
    assert not model[2].bias.requires_grad

    plain = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 6))
    plain.load_state_dict({k: v.full_tensor() for k, v in model.state_dict().items()})
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(x), plain(x))
    with pytest.raises(vd.DTensorError, match="already"):
        vd.distribute_module(model, mesh)
    with pytest.raises(vd.DTensorError, match="input_fn takes 1"):
        vd.distribute_module(nn.Linear(2, 2), mesh, input_fn=lambda x: x)


@case
def torch_tensors_convert_without_a_copy(mesh):
    whole = torch.arange(15.0).reshape(5, 3)
    for placements in [(Shard(0), Shard(1)), (Replicate(), Shard(0)), (Shard(0), Shard(0))]:
        ours = vd.distribute_tensor(whole, mesh, placements)
        with trace() as traced:
            theirs = ours.to_torch()
            back = vd.DTensor.from_torch(theirs)
        assert traced.counts() == {}
        assert isinstance(theirs, stock.DTensor)
        assert torch.equal(theirs.full_tensor(), whole)
        assert back.placements == ours.placements
        assert back.shape == whole.shape
        assert torch.equal(back.full_tensor(), whole)
        pointers = {t.to_local().data_ptr() for t in (ours, theirs, back)}
        assert len(pointers) == 1
    for op in ("sum", "avg", "max", "min", "prod"):
        ours = vd.DTensor.from_local(torch.full((2,), 3.0), mesh, [Partial(op), Replicate()])
        assert torch.equal(ours.to_torch().full_tensor(), ours.full_tensor())
        assert vd.DTensor.from_torch(ours.to_torch()).placements == ours.placements


@case
def shards_keep_the_order_of_the_mesh(mesh):
    """torch sorts the ranks of its groups, unless (from 2.15 on) the mesh asks it not to."""
    whole, options = torch.arange(12.0).reshape(4, 3), [{}]
    options += [ASKED] if ASKED.keys() <= signature(DeviceMesh.__init__).parameters.keys() else []
    for asked in options:
        turned = DeviceMesh("cpu", [[2, 0], [3, 1]], mesh_dim_names=("u", "v"), **asked)
        for placements in ([Shard(0), Replicate()], [Replicate(), Shard(0)]):
            ours = vd.distribute_tensor(whole, turned, placements)
            assert torch.equal(ours.full_tensor(), whole)
            if asked or placements[0].is_shard():
                theirs = ours.to_torch()
                assert torch.equal(theirs.full_tensor(), whole)
                assert torch.equal(vd.DTensor.from_torch(theirs).full_tensor(), whole)
                continue
            theirs = stock.distribute_tensor(whole, turned, placements)
            for call in (ours.to_torch, lambda found=theirs: vd.DTensor.from_torch(found)):
                with pytest.raises(UnsupportedError, match="'v' the ranks do not ascend"):
                    call()


@case
def gradients_cross_the_border(mesh):
    whole = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    factor = torch.arange(24.0).reshape(6, 4)
    for placements in [(Shard(0), Shard(1)), (Replicate(), Shard(1)), (Shard(0), Replicate())]:
        leaf = vd.distribute_tensor(whole.clone().requires_grad_(), mesh, placements)
        middle = (leaf * 2).to_torch()
        theirs = middle * stock.distribute_tensor(factor, mesh, middle.placements)
        vd.DTensor.from_torch(theirs).sum().backward()
        assert torch.equal(leaf.grad.full_tensor(), 2 * factor)
        stock_leaf = stock.distribute_tensor(whole, mesh, middle.placements).requires_grad_()
        ours = vd.DTensor.from_torch(stock_leaf * 2)
        (ours * vd.distribute_tensor(factor, mesh, placements)).sum().backward()
        assert torch.equal(stock_leaf.grad.full_tensor(), 2 * factor)
    # A partial sum: what flows back into every term is the whole gradient.
    term = torch.ones(2, requires_grad=True)
    summed = vd.DTensor.from_local(term, mesh, [Partial(), Replicate()]).to_torch()
    (summed.redistribute(placements=[stock.Replicate()] * 2).to_local() * 3).sum().backward()
    assert term.grad.tolist() == [3.0, 3.0]


@case
def what_torch_cannot_express_is_an_error(mesh):
    ragged = vd.zeros(6, device_mesh=mesh, placements=[RaggedShard((0,), (1, 2)), Replicate()])
    with pytest.raises(UnsupportedError, match=r"no placement for RaggedShard"):
        ragged.to_torch()
    with pytest.raises(LayoutError, match="found Tensor"):
        vd.DTensor.from_torch(torch.ones(2))
    average = vd.DTensor.from_local(
        torch.ones(2, requires_grad=True), mesh, [Partial("avg"), Replicate()]
    )
    with pytest.raises(UnsupportedError, match="gradient"):
        average.to_torch()
    assert average.detach().to_torch().placements[0] == stock.Partial("avg")


@case
def gradients_lie_as_grad_placements_say(mesh):
    local = torch.ones(3, requires_grad=True)
    made = vd.DTensor.from_local(
        local, mesh, [Replicate(), Replicate()], grad_placements=[Partial(), Replicate()]
    )
    (made * 5).sum().backward()
    expected = 5.0 if mesh.get_coordinate()[0] == 0 else 0.0
    assert local.grad.tolist() == [expected] * 3
    with pytest.raises(LayoutError, match="can lie as"):
        vd.DTensor.from_local(
            local, mesh, [Replicate(), Replicate()], grad_placements=[Shard(0), Replicate()]
        )


@case
def redistribute_sends_in_other_dtypes(mesh):
    leaf = vd.distribute_tensor(torch.ones(8, 2, requires_grad=True), mesh, [Shard(0), Replicate()])
    with trace() as forward:
        made = leaf.redistribute(
            placements=[Replicate(), Replicate()],
            forward_dtype=torch.bfloat16,
            backward_dtype=torch.float64,
        )
    factor = vd.distribute_tensor(torch.ones(8, 2).bfloat16(), mesh, [Shard(0), Replicate()])
    with trace() as backward:
        (made * factor.redistribute(placements=[Shard(1), Replicate()])).sum().backward()
    assert made.dtype == torch.bfloat16
    assert [r.dtype for r in forward.records] == [torch.bfloat16]
    assert {r.dtype for r in backward.records if r.op == "reduce_scatter"} <= {torch.float64}
    assert leaf.grad.dtype == torch.float32
    assert leaf.grad.full_tensor().tolist() == [[1.0, 1.0]] * 8


@pytest.mark.parametrize("name", CASES)
@on_ranks(4)
def test_ecosystem(name):
    CASES[name](device_mesh((2, 2), ("dp", "tp")))
