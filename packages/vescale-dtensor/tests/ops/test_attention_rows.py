"""Attention whose sequences are sharded: each rank computes its rows, as one device does."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
import vescale_dtensor as vd
from attention_steps import laid, require_same, with_gradients
from on_mesh import on_mesh
from one_device import full_tensors
from vescale_comm import simulate, trace
from vescale_dtensor import Replicate, Shard, distribute_tensor

CALLS = {
    "plain": {},
    "causal": {"is_causal": True},
    "dropout": {"dropout_p": 0.4},
    "causal dropout": {"is_causal": True, "dropout_p": 0.4},
    "grouped": {"is_causal": True, "enable_gqa": True},
    "grouped dropout": {"dropout_p": 0.4, "enable_gqa": True},
    "mask": {"attn_mask": True},
}
LAYOUTS = {"rows": Shard(2), "interleaved": vd.InterleavedShard(2, 2)}
# Of the query and of keys, for four ranks: what divides over them is exchanged.
HEADS = {"exchange": ((4, 4), (4, 2)), "gather": ((3, 3), (6, 2))}
SENT = {
    # Rows of query, key and value for heads, heads of the result for rows; and their gradients.
    "exchange": ["all_to_all"] * 8,
    # Keys and values come, and their gradients go back; nothing else is sent.
    "gather": ["all_gather"] * 2 + ["reduce_scatter"] * 2,
}


def tensors(tokens, heads):
    torch.manual_seed(tokens)
    query, keys = heads
    counts = (query, keys, keys)
    return [torch.randn(2, count, tokens, 8, dtype=torch.float64) for count in counts]


def options(call, tokens):
    given = dict(CALLS[call])
    if given.get("attn_mask"):
        given["attn_mask"] = torch.ones(tokens, tokens).bool().tril(1)
    return given


def require_rows(call, tokens, heads, placement, sent, ranks=4):
    """Results, gradients and the next random number are one device's; so much is sent."""

    def step(mesh):
        parts = laid(tensors(tokens, heads), mesh, [placement])
        with trace() as seen:
            result = F.scaled_dot_product_attention(*parts, **options(call, tokens))
            result.square().sum().backward()
        found = [result, *[one.grad for one in parts]]
        if mesh is not None:
            assert all(one.placements == (placement,) for one in found), "rows stay where they are"
            assert sorted(one.op for one in seen.records) == sent
        return [*full_tensors(found), torch.rand(())]

    require_same(step, (ranks,))


@pytest.mark.parametrize("tokens", [16, 10, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("way", HEADS)
def test_rows_stay_where_they_lie(way, call, layout, tokens):
    heads = HEADS[way]["grouped" in call]
    require_rows(call, tokens, heads, LAYOUTS[layout], SENT[way])


def test_an_empty_cache_does_not_gather_what_it_is_given():
    def program(rank, world_size):
        keys = distribute_tensor(
            torch.randn(2, 2, 6, 4), vd.init_device_mesh("cpu", (4,)), [Shard(2)]
        )
        with trace() as sent:
            joined = torch.cat([torch.empty(0), keys], dim=-2)
        return joined.placements, len(sent.records), joined.shape

    assert simulate(4).run(program) == [((Shard(2),), 0, (2, 2, 6, 4))] * 4


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_a_mask_beside_is_causal_is_as_on_one_device(dropout):
    """Some kernels of torch take both; the mask of a rank's rows must not replace the user's."""

    def attend(placement=None):
        torch.manual_seed(0)
        query, mask = torch.randn(2, 4, 8, 4), torch.eye(8, dtype=torch.bool)
        if placement is not None:
            query = distribute_tensor(query, vd.init_device_mesh("cpu", (4,)), [placement])
        try:
            found = F.scaled_dot_product_attention(query, query, query, mask, dropout, True)
        except RuntimeError as error:
            return str(error).partition("Explicit attn_mask")[1]
        return found if placement is None else found.full_tensor()

    alone = attend()
    for found in simulate(4).run(lambda rank, world_size: attend(Shard(2))):
        if isinstance(alone, str):
            assert found == alone != ""
        else:
            torch.testing.assert_close(found, alone)


@pytest.mark.parametrize("call", ["grouped", "grouped dropout"])
def test_key_heads_are_repeated_as_seldom_as_ranks_need(call):
    """Four key heads for sixteen: each twice, so that eight ranks have one and its queries."""
    require_rows(call, 10, (16, 4), Shard(2), SENT["exchange"], ranks=8)


@pytest.mark.parametrize("names", [("cp", "tp"), ("tp", "cp")])
def test_keys_that_are_replicated_where_the_query_has_heads(names):
    """Tensor parallel ranks that all hold all key heads, as where these are few."""
    sizes = {"cp": 4, "tp": 2}
    query, keys = {"cp": Shard(2), "tp": Shard(1)}, {"cp": Shard(2), "tp": Replicate()}
    lies = [[one[name] for name in names] for one in (query, keys, keys)]

    def attend(mesh):
        parts = laid(tensors(10, (8, 4)), mesh, *lies)
        with trace() as sent:
            result = F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
        assert mesh is None or [one.op for one in sent.records] == ["all_to_all"] * 4
        return with_gradients(result, parts)

    require_same(attend, tuple(sizes[name] for name in names), names)


AXES = {
    "heads inside": (("cp", "tp"), [Shard(2), Shard(1)]),
    "heads outside": (("tp", "cp"), [Shard(1), Shard(2)]),
    "batch": (("dp", "cp"), [Shard(0), Shard(2)]),
    "two axes of rows": (("a", "b"), [Shard(2), Shard(2)]),
}


@pytest.mark.parametrize("call", ["causal", "dropout", "grouped"])
@pytest.mark.parametrize("axes", AXES)
def test_rows_beside_other_axes(axes, call):
    names, placements = AXES[axes]
    heads = HEADS["exchange"]["grouped" in call]

    def attend(mesh):
        parts = laid(tensors(10, heads), mesh, placements)
        with trace() as sent:
            result = F.scaled_dot_product_attention(*parts, **options(call, 10))
        if mesh is not None:
            assert result.placements == tuple(placements)
            # Between two ranks, keys and values of half as many heads are less to send.
            way = "all_gather" if call == "grouped" else "all_to_all"
            assert {one.op for one in sent.records} == {way}
        if call != "dropout":
            return with_gradients(result, parts)
        # It is written out, so that torch has gradients of its gradients.
        (first,) = torch.autograd.grad(result.square().sum(), parts[0], create_graph=True)
        return [*full_tensors([result]), *with_gradients(first, parts)]

    require_same(attend, (2, 2), names, rtol=1e-9, atol=1e-11)


def test_an_exchange_is_captured():
    def program(mesh):
        parts = laid(tensors(10, (4, 4)), mesh, [Shard(2)])

        def attend(query, key, value):
            return F.scaled_dot_product_attention(query, key, value, is_causal=True).square().sum()

        captured, found = vd.capture(attend), []
        for run in (attend, captured, captured):
            loss = run(*parts)
            found.append([loss, *torch.autograd.grad(loss, parts)])
        return captured.programs, [[one.full_tensor() for one in each] for each in found]

    for programs, (eager, *replayed) in on_mesh((4,), program):
        assert len(programs) == 1
        for found in replayed:
            assert all(map(torch.equal, found, eager))


@pytest.mark.parametrize("dim", [1, 2])
def test_leading_dims_that_broadcast_over_ranks_that_hold_nothing(dim):
    def attend(mesh):
        torch.manual_seed(0)
        parts = [torch.randn(2, a, b, 3, 4) for a, b in ((1, 3), (5, 1), (5, 3))]
        # The value alone has an extent there that ranks share.
        parts = laid(parts, mesh, [Replicate()], [Replicate()], [Shard(dim)])
        return with_gradients(F.scaled_dot_product_attention(*parts), parts)

    require_same(attend, (4,), rtol=1.3e-6, atol=1e-5)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("lead", [(4,), (2, 4), (3, 2, 4)], ids=str)
@pytest.mark.parametrize("heads", [4, 2])
def test_heads_are_grouped_in_the_third_dim_from_the_end(lead, heads, dropout):
    torch.manual_seed(2)
    query = torch.randn(*lead, 3, 8)
    key, value = torch.randn(2, *lead[:-1], heads, 6, 8)
    call = partial(F.scaled_dot_product_attention, dropout_p=dropout, enable_gqa=True)
    torch.manual_seed(5)
    expected = call(query, key, value)

    def program(mesh):
        for placement in (Replicate(), Shard(0), Shard(len(lead) - 1)):
            laid = [distribute_tensor(x, mesh, [placement]) for x in (query, key, value)]
            torch.manual_seed(5)
            torch.testing.assert_close(call(*laid).full_tensor(), expected)

    on_mesh((2,), program)
