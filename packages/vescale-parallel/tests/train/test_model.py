"""The example model is plain single-device PyTorch, and its plan is at most 25 lines.

The text, its split and its sampling depend on paths, seed and step only.
"""

import ast
import inspect
from pathlib import Path

import pytest
import torch
from torch import nn
from vescale_parallel import TrainError
from vescale_parallel.train import model as model_file
from vescale_parallel.train import plan as plan_file
from vescale_parallel.train.data import load_corpus, training_batch, validation_batches
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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "texts"
    (root / "deep").mkdir(parents=True)
    for number in range(30):
        name = f"deep/{number}.txt" if number % 2 else f"{number}.md"
        (root / name).write_text(f"file {number:02d} " * 40)
    (root / ".hidden").write_text("secret " * 1000)
    return root


def test_the_split_is_deterministic_and_disjoint(folder: Path):
    one, two = (load_corpus([str(folder)], context=16) for _ in range(2))
    assert torch.equal(one.train, two.train)
    assert torch.equal(one.validation, two.validation)
    assert one.checksum == two.checksum
    assert one.files == 30
    total = sum(path.stat().st_size for path in folder.rglob("[!.]*") if path.is_file())
    assert len(one.train) + len(one.validation) == total + 29
    assert b"secret" not in bytes(one.train.tolist()) + bytes(one.validation.tolist())


def test_the_standard_library_is_the_default():
    corpus = load_corpus([], context=128)
    assert corpus.files > 300
    assert len(corpus.train) > 5_000_000
    assert b"def " in bytes(corpus.train[:100_000].tolist())


def test_batches_are_windows_of_the_text_and_repeat_by_step(folder: Path):
    corpus = load_corpus([str(folder)], context=16)
    text = bytes(corpus.train.tolist())
    seen = set()
    for step in range(5):
        tokens, targets = training_batch(corpus, batch=3, context=16, seed=1, step=step)
        again = training_batch(corpus, batch=3, context=16, seed=1, step=step)
        assert torch.equal(tokens, again[0])
        assert torch.equal(targets, again[1])
        assert torch.equal(tokens[:, 1:], targets[:, :-1])
        assert all(bytes(row.tolist()) in text for row in tokens)
        seen.add(bytes(tokens.flatten().tolist()))
    assert len(seen) == 5


def test_sampling_leaves_the_global_generator_alone(folder: Path):
    corpus = load_corpus([str(folder)], context=16)
    before = torch.get_rng_state()
    training_batch(corpus, batch=3, context=16, seed=1, step=0)
    assert torch.equal(before, torch.get_rng_state())


def test_validation_walks_the_held_out_text(folder: Path):
    corpus = load_corpus([str(folder)], context=16)
    held_out = bytes(corpus.validation.tolist())
    batches = list(validation_batches(corpus, batch=4, context=16, batches=2))
    assert [tuple(tokens.shape) for tokens, _ in batches] == [(4, 16), (4, 16)]
    walked = b"".join(bytes(tokens.flatten().tolist()) for tokens, _ in batches)
    assert walked == held_out[: 8 * 16]


def test_missing_empty_and_short_data(tmp_path: Path):
    with pytest.raises(TrainError, match="nowhere: no such file or folder"):
        load_corpus([str(tmp_path / "nowhere")], context=16)
    with pytest.raises(TrainError, match="holds no files"):
        load_corpus([str(tmp_path)], context=16)
    short = tmp_path / "short.txt"
    short.write_text("x" * 33)
    with pytest.raises(TrainError, match=r"has 33 bytes, and 34 are the least"):
        load_corpus([str(short)], context=16)
    short.write_text("x" * 34)
    assert len(load_corpus([str(short)], context=16).train) == 17
