"""The example model is plain single-device PyTorch, and its plan is at most 25 lines."""

import ast
import inspect

import torch
from torch import nn
from vescale_parallel.train import model as model_file
from vescale_parallel.train import plan as plan_file
from vescale_parallel.train.model import Decoder, ModelConfig

SMALL = ModelConfig(vocab=32, dim=16, layers=2, heads=4, kv_heads=2, hidden=24, context=12)


def test_the_model_imports_torch_and_the_standard_library_only():
    imported = set()
    for node in ast.walk(ast.parse(inspect.getsource(model_file))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add((node.module or "").partition(".")[0])
    assert imported == {"dataclasses", "torch"}


def test_the_plan_is_short():
    assert len(inspect.getsource(plan_file).splitlines()) <= 25


def test_the_plan_fits_the_model_on_every_mesh():
    for mesh in ({"dp": 2, "tp": 2}, {"tp": 4}, {"dp": 3}, {}):
        report = plan_file.PLAN.check(Decoder(SMALL), mesh)
        assert len(report.parameters) == len(list(Decoder(SMALL).parameters()))


def test_it_is_causal():
    torch.manual_seed(0)
    model = Decoder(SMALL).eval()
    tokens = torch.randint(32, (2, 12))
    changed = tokens.clone()
    changed[:, 8:] = (changed[:, 8:] + 1) % 32
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :8], after[:, :8])
    assert not torch.allclose(before[:, 8:], after[:, 8:])


def test_grouped_queries_equal_repeated_keys():
    torch.manual_seed(0)
    grouped = Decoder(SMALL).eval()
    wide = Decoder(ModelConfig(**{**SMALL.__dict__, "kv_heads": 4})).eval()
    state = grouped.state_dict()
    for name, weight in state.items():
        if name.endswith((".k.weight", ".v.weight")):
            heads = weight.view(2, 4, 16).repeat_interleave(2, dim=0)
            state[name] = heads.reshape(16, 16)
    wide.load_state_dict(state)
    tokens = torch.randint(32, (2, 12))
    with torch.no_grad():
        torch.testing.assert_close(grouped(tokens), wide(tokens))


def test_the_loss_starts_at_chance_and_falls():
    torch.manual_seed(0)
    model = Decoder(SMALL)
    tokens = torch.randint(32, (4, 13))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert abs(losses[0] - torch.tensor(32.0).log().item()) < 0.1
    assert losses[-1] < losses[0] - 0.5


def test_dropout_modules_can_be_observed():
    names = [n for n, m in Decoder(SMALL).named_modules() if isinstance(m, nn.Dropout)]
    assert "blocks.0.attention.dropout" in names
    assert "blocks.1.dropout" in names
