"""`local_map`: a function of local tensors takes and returns DTensors, with the gradients of one
device, whatever it replicates, sums or sends itself.
"""

import pytest
import torch
import vescale_dtensor as vd
from named_cases import named_cases
from vescale_comm import all_gather, all_reduce, group_of
from vescale_comm.testing import device_mesh, on_ranks
from vescale_dtensor import DisagreementError, LayoutError, Partial, RaggedShard, Replicate, Shard

CASES, case = named_cases()
X = torch.arange(24.0).reshape(6, 4) / 10
W = torch.arange(20.0).reshape(4, 5) / 7 - 1


def placed(mesh, tensor, dp, tp):
    leaf = tensor.clone().requires_grad_()
    return vd.distribute_tensor(leaf, mesh, [dp, tp], src_data_rank=None)


def agrees(mapped, leaves, dense):
    """Values and gradients equal those of the function on whole tensors."""
    wholes = [leaf.full_tensor().detach().requires_grad_() for leaf in leaves]
    expected = dense(*wholes)
    made = mapped(*leaves)
    torch.testing.assert_close(made.full_tensor(), expected)
    weight = torch.linspace(-1, 1, expected.numel()).reshape(expected.shape)
    (made * weight).sum().backward()
    (expected * weight).sum().backward()
    for leaf, whole in zip(leaves, wholes, strict=True):
        torch.testing.assert_close(leaf.grad.full_tensor(), whole.grad)


def summed(mesh):
    """A product that reduces itself."""
    return lambda x, w: all_reduce(torch.mm(x, w), group_of(mesh, "tp"))


# Function, and how its result and its operands lie.
R, S0, S1 = Replicate(), Shard(0), Shard(1)
PRODUCTS = [
    (lambda mesh: torch.mm, (S0, R), (S0, R), (R, R)),
    (lambda mesh: torch.mm, (R, R), (R, R), (R, R)),
    (lambda mesh: torch.mm, (R, Partial()), (R, S1), (R, S0)),
    (summed, (S0, R), (S0, S1), (R, S0)),
]


@case
def products(mesh):
    for function, out, of_x, of_w in PRODUCTS:
        mapped = vd.local_map(function(mesh), out_placements=list(out))
        agrees(mapped, [placed(mesh, X, *of_x), placed(mesh, W, *of_w)], torch.mm)


@case
def a_function_that_gathers_itself(mesh):
    group = group_of(mesh, "dp")
    mapped = vd.local_map(
        lambda x: all_gather(x * x, group, dim=0, sizes=[3, 3]),
        out_placements=[Replicate(), Shard(1)],
    )
    agrees(mapped, [placed(mesh, X, Shard(0), Shard(1))], torch.square)


@case
def a_function_that_divides_the_work_says_so(mesh):
    group, index = group_of(mesh, "tp"), mesh.get_coordinate()[1]

    def by_halves(x, w):
        half = slice(2 * index, 2 * index + 2)
        return all_reduce(torch.mm(x[:, half], w[half]), group)

    terms = [Replicate(), Partial()]
    mapped = vd.local_map(
        by_halves, out_placements=[Replicate(), Replicate()], in_grad_placements=(terms, terms)
    )
    leaves = [placed(mesh, t, Replicate(), Replicate()) for t in (X, W)]
    agrees(mapped, leaves, torch.mm)


@case
def uneven_pieces_have_the_extent_of_the_input(mesh):
    whole = torch.arange(15.0).reshape(5, 3)
    mapped = vd.local_map(torch.exp, out_placements=[Shard(0), Shard(1)])
    agrees(mapped, [placed(mesh, whole, Shard(0), Shard(1))], torch.exp)
    uneven = placed(mesh, whole, Shard(0), Replicate())
    doubled = {"out_placements": [Shard(0), Replicate()]}
    with pytest.raises(LayoutError, match=r"local_map\(.*found.*RaggedShard takes any sizes"):
        vd.local_map(lambda x: torch.cat([x, x]), **doubled)(uneven)
    ragged = {"out_placements": [RaggedShard((0,), (3, 2)), Replicate()]}
    made = vd.local_map(lambda x: torch.cat([x, x]), **ragged)(uneven)
    assert torch.equal(made.full_tensor(), torch.cat([whole[:3], whole[:3], whole[3:], whole[3:]]))
    made = vd.local_map(lambda x: torch.cat([x, x], 1), out_shapes=[(5, 6)], **doubled)(uneven)
    assert torch.equal(made.full_tensor(), torch.cat([whole, whole], 1))


@case
def structures_numbers_and_several_outputs(mesh):
    def function(pair, scale):
        first, second = pair
        return {"sum": first + second, "scaled": first * scale, "name": "local"}

    mapped = vd.local_map(
        function,
        out_placements=([Shard(0), Replicate()], [Shard(0), Replicate()], None),
        in_placements=([Shard(0), Replicate()], [Shard(0), Replicate()], None),
        redistribute_inputs=True,
    )
    first, second = placed(mesh, X, Shard(0), Replicate()), placed(mesh, X, Shard(1), Replicate())
    made = mapped((first, second), 3)
    assert torch.equal(made["sum"].full_tensor(), X + X)
    assert torch.equal(made["scaled"].full_tensor(), X * 3)
    assert made["name"] == "local"
    assert mapped((X, X), 3)["scaled"].equal(X * 3)  # no DTensor: the function itself


@case
def what_depends_on_the_data_has_one_shape_on_all_ranks(mesh):
    """Ranks that keep different numbers of rows believe in one tensor, or all of them raise."""
    rows = vd.distribute_tensor(torch.arange(8.0), mesh, [Shard(0), Replicate()])

    def kept(least, placement):
        mapped = vd.local_map(lambda t: t[t > least], out_placements=[placement, Replicate()])
        return mapped(rows)

    for _ in range(3):  # at every call: the data differs from call to call
        assert kept(0.5, RaggedShard((0,), (3, 4))).full_tensor().tolist() == list(range(1, 8))
        assert kept(9.0, Shard(0)).shape == (0,)
        for least in (1.5, 5.5):
            with pytest.raises(LayoutError, match=r"local_map\(.*found ranks 0, 1: .*ranks 2, 3"):
                kept(least, Shard(0))


@case
def what_ranks_compute_differently_is_an_error_on_all(mesh):
    rank = mesh.get_rank()
    x = placed(mesh, X, Shard(0), Replicate())
    on = [Shard(0), Replicate()]
    wrong = [
        (lambda t: t.half() if rank == 3 else t, "f16 on rank 3"),
        (lambda t: t.flatten() if rank == 3 else t, "'dims': .*1 on rank 3"),
        (lambda t: t.detach() if rank == 3 else t, "requires_grad"),
        (
            lambda t: t.t().contiguous().t() if rank == 3 else t,
            r"\[1, 0\] on rank 3",
        ),
    ]
    for function, words in wrong:
        for _ in range(3):
            with pytest.raises(DisagreementError, match=f"(?s)local_map.*{words}"):
                vd.local_map(function, out_placements=on)(x)
    with pytest.raises(LayoutError, match=r"found ranks 0-2: .*; rank 3: "):
        vd.local_map(lambda t: t[rank == 3 :], out_placements=on)(x)
    with pytest.raises(DisagreementError, match="out_shapes="):
        vd.local_map(lambda t: t, out_placements=on, out_shapes=[(6 + rank, 4)])(x)


@case
def dims_that_are_sharded_as_one_need_their_shape(mesh):
    flat = [RaggedShard((0, 1), (1, 3)), Replicate()]
    x = vd.distribute_tensor(X, mesh, flat)
    with pytest.raises(LayoutError, match=r"lies flat.*out_shapes="):
        vd.local_map(torch.exp, out_placements=flat)(x)
    made = vd.local_map(torch.exp, out_placements=flat, out_shapes=[X.shape])(x)
    torch.testing.assert_close(made.full_tensor(), X.exp())


@case
def mistakes_are_named(mesh):
    x = placed(mesh, X, Shard(0), Replicate())
    on = [Shard(0), Replicate()]
    wrong = [
        (
            {"out_placements": on, "in_placements": ([Shard(1), Replicate()],)},
            "redistribute_inputs",
        ),
        ({"out_placements": on, "in_placements": (None,)}, r"in_placements\[0\] is None"),
        ({"out_placements": on, "in_placements": (on, on)}, "2 entries for 1"),
        ({"out_placements": (on, on)}, "returned 1 values"),
    ]
    for arguments, message in wrong:
        with pytest.raises(LayoutError, match=f"local_map\\(Tensor.exp\\).*{message}"):
            vd.local_map(torch.Tensor.exp, **arguments)(x)
    with pytest.raises(LayoutError, match="by position"):
        vd.local_map(lambda x: x, out_placements=on)(x=x)
    with pytest.raises(LayoutError, match="give None"):
        vd.local_map(lambda x: 3, out_placements=on)(x)


@pytest.mark.parametrize("name", CASES)
@on_ranks(4)
def test_local_map(name):
    CASES[name](device_mesh((2, 2), ("dp", "tp")))


def test_types_of_local_tensors_are_not_checked_and_it_is_said():
    with pytest.raises(vd.UnsupportedError, match=r"spmd_types=True.*Leave it out.*in_placements"):
        vd.local_map(torch.exp, out_placements=[Shard(0)], spmd_types=True)
