"""`python -m vescale_parallel context`: its bytes are those that attention sends."""

import json

import pytest
import torch
import torch.nn.functional as F
from vescale_comm import simulate, trace
from vescale_dtensor import Shard, distribute_tensor, init_device_mesh, sequence_attention
from vescale_parallel._cli.arguments import main
from vescale_parallel._cost.context import Attention, attention_ways, chosen
from vescale_parallel._cost.links import CLUSTERS

LINK = CLUSTERS["h100"].inside
ASKED = ["context", "--tokens", "131072", "--heads", "64", "--kv-heads", "8", "--ranks", "8", "64"]


@pytest.mark.parametrize(("heads", "keys"), [(4, 4), (8, 4), (8, 2), (6, 3), (3, 3)])
def test_what_is_priced_is_what_is_sent(heads: int, keys: int):
    def step(rank: int, world_size: int) -> tuple[int, int]:
        mesh = init_device_mesh("cpu", (4,))
        shapes = [(2, count, 16, 8) for count in (heads, keys, keys)]
        parts = [distribute_tensor(torch.randn(one), mesh, [Shard(2)]) for one in shapes]
        for one in parts:
            one.requires_grad_()
        with trace() as sent:
            found = F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
            torch.autograd.grad(found, parts, torch.ones_like(found))
        return sum(record.bytes for record in sent.records), len(sent.records)

    attention = Attention(tokens=16, heads=heads, kv_heads=keys, head_dim=8, batch=2, itemsize=4)
    way = chosen(attention_ways(attention, 4, LINK))
    assert simulate(4).run(step) == [(way.sent, way.collectives)] * 4


def test_what_a_ring_is_priced_is_what_it_sends():
    def step(rank: int, world_size: int) -> tuple[int, int]:
        mesh = init_device_mesh("cpu", (4,))
        shapes = [(2, count, 16, 8) for count in (6, 2, 2)]
        parts = [distribute_tensor(torch.randn(one), mesh, [Shard(2)]) for one in shapes]
        for one in parts:
            one.requires_grad_()
        with trace() as sent, sequence_attention("ring"):
            found = F.scaled_dot_product_attention(*parts, enable_gqa=True)
            torch.autograd.grad(found, parts, torch.ones_like(found))
        return sum(record.bytes for record in sent.records), len(sent.records)

    attention = Attention(tokens=16, heads=6, kv_heads=2, head_dim=8, batch=2, itemsize=4)
    way = attention_ways(attention, 4, LINK)[2]
    assert way.name == "ring"
    assert simulate(4).run(step) == [(way.sent, way.collectives)] * 4


def test_the_table_says_which_way_is_taken(capsys: pytest.CaptureFixture[str]):
    assert main(ASKED) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[0] for line in lines] == ["8"] * 3 + ["64"] * 3
    assert [line.split()[1] for line in lines if line.endswith("*")] == ["heads", "heads"]
    assert main([*ASKED, "--json", "--heads", "72"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["64"]["chosen"] == "ring"
    assert "64 ranks do not divide 72 heads" in found["64"]["ways"][0]["lacks"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--tokens", "4"], "4 tokens cannot be sharded over 8 ranks"),
        (["--kv-heads", "7"], "heads are a multiple of kv_heads"),
    ],
)
def test_questions_without_an_answer(
    more: list[str], words: str, capsys: pytest.CaptureFixture[str]
):
    assert main([*ASKED, *more]) == 2
    assert words in capsys.readouterr().err
