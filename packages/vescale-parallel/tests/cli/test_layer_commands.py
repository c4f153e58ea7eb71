"""`python -m vescale_parallel context` and `experts`: their bytes are those that are sent.

The tables on paper in the guides hold the figures that the commands print today.
"""

import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from vescale_comm import simulate, trace
from vescale_dtensor import Shard, distribute_tensor, init_device_mesh, sequence_attention
from vescale_parallel import MoE, Plan, mesh, parallelize
from vescale_parallel._cli.arguments import main
from vescale_parallel._cost.context import Attention, attention_ways, chosen
from vescale_parallel._cost.experts import ExpertLayer, chosen_share, expert_shares
from vescale_parallel._cost.links import CLUSTERS

LINK = CLUSTERS["h100"].inside
CONTEXT = [
    "context",
    "--tokens",
    "131072",
    "--heads",
    "64",
    "--kv-heads",
    "8",
    "--ranks",
    "8",
    "64",
]


PRICED = [
    (4, 4, "auto"),
    (8, 4, "auto"),
    (8, 2, "auto"),
    (6, 3, "auto"),
    (3, 3, "auto"),
    (6, 2, "ring"),
]


@pytest.mark.parametrize(("heads", "keys", "way"), PRICED)
def test_what_is_priced_is_what_attention_sends(heads: int, keys: int, way: str):
    def step(rank: int, world_size: int) -> tuple[int, int]:
        mesh = init_device_mesh("cpu", (4,))
        shapes = [(2, count, 16, 8) for count in (heads, keys, keys)]
        parts = [distribute_tensor(torch.randn(one), mesh, [Shard(2)]) for one in shapes]
        for one in parts:
            one.requires_grad_()
        with trace() as sent, sequence_attention(way):
            found = F.scaled_dot_product_attention(*parts, is_causal=way == "auto", enable_gqa=True)
            torch.autograd.grad(found, parts, torch.ones_like(found))
        return sum(record.bytes for record in sent.records), len(sent.records)

    attention = Attention(tokens=16, heads=heads, kv_heads=keys, head_dim=8, batch=2, itemsize=4)
    ways = attention_ways(attention, 4, LINK)
    priced = ways[2] if way == "ring" else chosen(ways)
    assert way in (priced.name, "auto")
    assert simulate(4).run(step) == [(priced.sent, priced.collectives)] * 4


def test_many_heads_take_no_longer():
    most = 10**12
    attention = Attention(tokens=most, heads=most, kv_heads=1, head_dim=1)
    assert attention_ways(attention, most, LINK)[0].lacks is None


def test_the_table_says_which_way_is_taken(capsys: pytest.CaptureFixture[str]):
    assert main(CONTEXT) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[0] for line in lines] == ["8"] * 3 + ["64"] * 3
    assert [line.split()[1] for line in lines if line.endswith("*")] == ["heads", "heads"]
    assert main([*CONTEXT, "--json", "--heads", "72"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["64"]["chosen"] == "ring"
    assert "64 ranks do not divide 72 heads" in found["64"]["ways"][0]["lacks"]


EXPERTS = ["experts", "--experts", "256", "--top-k", "8", "--hidden", "7168", "--width", "2048"]


@pytest.mark.parametrize("k", [1, 4])
def test_what_is_priced_is_what_experts_send(k: int):
    """Of all ranks: which rank sends more depends on the router, what all send does not."""

    def step(rank: int, world_size: int) -> list[int]:
        torch.manual_seed(0)
        model = nn.Sequential(MoE(8, 16, 4, k))
        parallelize(model, mesh(ep=4, device_type="cpu"), Plan(batch="ep:0", experts="ep"))
        with torch.no_grad():  # token i chooses the experts i, i + 1, ...: evenly
            model[0].router.weight.copy_(torch.eye(4, 8).roll(0, 0))
        x = torch.zeros(16, 8)
        for row in range(16):
            for j in range(k):
                x[row, (row + j) % 4] = 2.0 - 0.1 * j
        x.requires_grad_()
        with trace() as sent:
            model(x).square().sum().backward()
        return [r.bytes for r in sent.records if r.op == "all_to_all" and r.dtype == torch.float32]

    layer = ExpertLayer(experts=4, top_k=k, tokens=4, hidden=8, width=16, itemsize=4)
    share = expert_shares(layer, 4, LINK)[0]
    found = simulate(4).run(step)
    assert {len(one) for one in found} == {share.collectives}
    assert sum(map(sum, found)) == 4 * share.sent


def test_the_table_says_what_sends_least(capsys: pytest.CaptureFixture[str]):
    assert main([*EXPERTS, "--ranks", "8", "64"]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[0] for line in lines] == ["8"] * 4 + ["64"] * 4
    assert ["tokens move" in line for line in lines if line.endswith("*")] == [True] * 2
    # So many tokens a rank that the few experts are less.
    assert main([*EXPERTS, "--ranks", "8", "--json", "--tokens", "1000000"]) == 0
    found = json.loads(capsys.readouterr().out)["8"]
    assert found["least"] == "all experts everywhere"
    assert found["ways"][0]["stored"] == found["ways"][3]["stored"] / 8


NO_ANSWER = [
    ("experts", "--ranks 300", "256 experts cannot be shared by 300 ranks"),
    ("experts", "--ranks 8 --top-k 300", "tokens choose at most all experts"),
    ("context", "--tokens 4", "4 tokens cannot be sharded over 8 ranks"),
    ("context", "--kv-heads 7", "heads are a multiple of kv_heads"),
]


@pytest.mark.parametrize(("asked", "more", "words"), NO_ANSWER)
def test_questions_without_an_answer(
    asked: str, more: str, words: str, capsys: pytest.CaptureFixture[str]
):
    assert main([*(CONTEXT if asked == "context" else EXPERTS), *more.split()]) == 2
    assert words in capsys.readouterr().err


def test_uneven_shares_store_the_largest():
    layer = ExpertLayer(experts=6, top_k=1, tokens=4, hidden=8, width=16)
    assert expert_shares(layer, 4, LINK)[0].stored == layer.weights / 3
    assert chosen_share(expert_shares(layer, 1, LINK)).sent == 0


DOCS = Path(__file__).parents[2] / "docs"
ASKED = {"sequences": CONTEXT, "experts": [*EXPERTS, "--ranks", "64"]}


def written(page: str) -> list[list[str]]:
    """The rows of the guide's table: ranks, way and figures, and what is said of them."""
    text = (DOCS / f"{page}.md").read_text()
    rows = re.findall(r"^ +\| (\d+ \|.*)\|$", text, re.MULTILINE)
    # "(`zero=3`)" and "by 1.5" say more than the command does.
    return [
        [re.sub(r" \(.*\)| by [\d.]+", "", one).strip() for one in row.split("|")] for row in rows
    ]


def printed(page: str, capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    assert main(ASKED[page]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    return [re.split(r" {2,}", line.strip()) for line in lines]


def short(cell: str) -> str:
    """Sizes as the guides write them: 1008 MiB, 1.3 GiB, 0."""
    return "0" if cell == "0 B" else cell.replace(".0 ", " ")


@pytest.mark.parametrize(("page", "figures"), [("sequences", 6), ("experts", 7)])
def test_figures_and_choice(page: str, figures: int, capsys: pytest.CaptureFixture[str]):
    rows, lines = written(page), printed(page, capsys)
    assert len(rows) == len(lines) > 3
    for row, line in zip(rows, lines, strict=True):
        assert list(map(short, row[:figures])) == list(map(short, line[:figures]))
        assert row[figures].startswith(("taken", "sends least")) == (line[-1] == "*")


def test_what_is_said_behind_them(capsys: pytest.CaptureFixture[str]):
    assert main([*ASKED["sequences"], "--heads", "40"]) == 0
    ring = capsys.readouterr().out.splitlines()[-1]
    assert "ring" in ring
    assert ring.endswith("*")
    least = {}
    for tokens in (90_000, 110_000):  # "some 100,000 tokens a rank"
        assert main([*ASKED["experts"], "--tokens", str(tokens), "--json"]) == 0
        least[tokens] = "all experts everywhere" in capsys.readouterr().out.split('"ways"')[0]
    assert least == {90_000: False, 110_000: True}
