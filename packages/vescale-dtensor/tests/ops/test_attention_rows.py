"""Attention whose sequences are sharded: each rank computes its rows, as one device does."""

import pytest
import torch
import torch.nn.functional as F
from vescale_comm import simulate, trace
from vescale_dtensor import InterleavedShard, Shard, distribute_tensor, init_device_mesh

CALLS = {
    "plain": {},
    "causal": {"is_causal": True},
    "dropout": {"dropout_p": 0.4},
    "causal dropout": {"is_causal": True, "dropout_p": 0.4},
    "grouped": {"is_causal": True, "enable_gqa": True},
    "mask": {"attn_mask": True},
}
LAYOUTS = {"rows": Shard(2), "interleaved": InterleavedShard(2, 2)}


def tensors(tokens, grouped):
    torch.manual_seed(tokens)
    heads = (4, 2, 2) if grouped else (4, 4, 4)
    return [torch.randn(2, count, tokens, 8, dtype=torch.float64) for count in heads]


def options(call, tokens):
    given = dict(CALLS[call])
    if given.get("attn_mask"):
        given["attn_mask"] = torch.ones(tokens, tokens).bool().tril(1)
    return given


def step(call, tokens, placement=None):
    """Result, gradients, the next random number; and what was sent."""
    parts = tensors(tokens, call == "grouped")
    if placement is not None:
        mesh = init_device_mesh("cpu", (4,))
        parts = [distribute_tensor(one, mesh, [placement]) for one in parts]
    for one in parts:
        one.requires_grad_()
    with trace() as sent:
        result = F.scaled_dot_product_attention(*parts, **options(call, tokens))
        result.square().sum().backward()
        gradients = [one.grad for one in parts]
    found = [result.detach(), *gradients]
    if placement is None:
        return found, torch.rand(()), []
    assert all(one.placements == (placement,) for one in found), "the rows stay where they are"
    return [one.full_tensor() for one in found], torch.rand(()), [one.op for one in sent.records]


@pytest.mark.parametrize("tokens", [16, 10, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("call", CALLS)
def test_rows_are_computed_where_they_lie(call, layout, tokens):
    wanted, drawn, _ = step(call, tokens)
    ranks = simulate(4).run(lambda rank, world_size: step(call, tokens, LAYOUTS[layout]))
    for found, number, sent in ranks:
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
        assert torch.equal(number, drawn)
        # Keys and values come, and their gradients go back; nothing else is sent.
        assert sorted(sent) == ["all_gather"] * 2 + ["reduce_scatter"] * 2


def test_an_empty_cache_does_not_gather_what_it_is_given():
    def program(rank, world_size):
        keys = distribute_tensor(torch.randn(2, 2, 6, 4), init_device_mesh("cpu", (4,)), [Shard(2)])
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
            query = distribute_tensor(query, init_device_mesh("cpu", (4,)), [placement])
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
