"""`python -m vescale_parallel experts`: its bytes are those that a layer of experts sends."""

import json

import pytest
import torch
from torch import nn
from vescale_comm import simulate, trace
from vescale_parallel import MoE, Plan, mesh, parallelize
from vescale_parallel._cli.arguments import main
from vescale_parallel._cost.experts import ExpertLayer, chosen_share, expert_shares
from vescale_parallel._cost.links import CLUSTERS

LINK = CLUSTERS["h100"].inside
ASKED = ["experts", "--experts", "256", "--top-k", "8", "--hidden", "7168", "--width", "2048"]


@pytest.mark.parametrize("k", [1, 4])
def test_what_is_priced_is_what_is_sent(k: int):
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
    assert main([*ASKED, "--ranks", "8", "64"]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[0] for line in lines] == ["8"] * 4 + ["64"] * 4
    assert ["tokens move" in line for line in lines if line.endswith("*")] == [True] * 2
    # So many tokens a rank that the few experts are less.
    assert main([*ASKED, "--ranks", "8", "--json", "--tokens", "1000000"]) == 0
    found = json.loads(capsys.readouterr().out)["8"]
    assert found["least"] == "all experts everywhere"
    assert found["ways"][0]["stored"] == found["ways"][3]["stored"] / 8


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--ranks", "300"], "256 experts cannot be shared by 300 ranks"),
        (["--ranks", "8", "--top-k", "300"], "tokens choose at most all experts"),
    ],
)
def test_questions_without_an_answer(
    more: list[str], words: str, capsys: pytest.CaptureFixture[str]
):
    assert main([*ASKED, *more]) == 2
    assert words in capsys.readouterr().err


def test_uneven_shares_store_the_largest():
    layer = ExpertLayer(experts=6, top_k=1, tokens=4, hidden=8, width=16)
    assert expert_shares(layer, 4, LINK)[0].stored == layer.weights / 3
    assert chosen_share(expert_shares(layer, 1, LINK)).sent == 0
