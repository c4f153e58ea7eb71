"""Hugging Face models that are built without storage are bitwise those of one device.

Parameters, buffers, the generator afterwards and the loss with dropout, over tp and ZeRO 3; the
weights that they save are read by `from_pretrained`, and `load_pretrained` reads those of
`save_pretrained` of Hugging Face.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from vescale_comm import simulate
from vescale_dtensor import DTensor
from vescale_parallel import Plan, deferred, load_pretrained, parallelize, save_pretrained
from vescale_parallel import mesh as make_mesh
from vescale_parallel._deferred.recording import DeferredTensor

pytestmark = [
    pytest.mark.models,
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
    ),
]

TOKENS = torch.arange(24).view(2, 12) % 90
TEXT = {"input_ids": TOKENS, "labels": TOKENS}
IMAGES = {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 32 * 32).view(2, 3, 32, 32)}


def model_of(name: str) -> tuple[Any, dict[str, Any]]:
    """A tiny model of that kind, with dropout, and a batch."""
    import transformers as hf

    common: dict[str, Any] = {"vocab_size": 97, "bos_token_id": 1, "eos_token_id": 2}
    small: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    if name == "gpt2":
        config = hf.GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=32, **common)
        return hf.GPT2LMHeadModel(config), TEXT
    if name == "llama":
        config = hf.LlamaConfig(num_key_value_heads=2, attention_dropout=0.1, **small, **common)
        return hf.LlamaForCausalLM(config), TEXT
    if name == "bert":
        return hf.BertForMaskedLM(hf.BertConfig(**small, **common)), TEXT
    config = hf.ViTConfig(image_size=32, patch_size=8, hidden_dropout_prob=0.1, **small)
    return hf.ViTForImageClassification(config), IMAGES | {"labels": torch.tensor([0, 1])}


def values(tensors: Any) -> dict[str, torch.Tensor]:
    """Global values by name."""
    return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in tensors}


NAMES = ("gpt2", "llama", "bert", "vit")
# A run takes the first; `-m slow` takes the rest.


@pytest.mark.parametrize(
    "name", [NAMES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:])]
)
def test_a_deferred_model_is_that_of_one_device(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    expected, batch = model_of(name)
    expected.train()
    after = torch.get_rng_state()
    loss = expected(**batch).loss.item()
    parameters, buffers = dict(expected.named_parameters()), dict(expected.named_buffers())
    if name == "vit":
        # transformers saves it under other names than those of the model.
        save_pretrained(expected, tmp_path / "theirs")
    else:
        expected.save_pretrained(tmp_path / "theirs")

    def rank(rank: int, size: int) -> None:
        for sizes, zero in (({"tp": 2}, 0), ({"dp": 2}, 3)):
            mesh = make_mesh(device_type="cpu", **sizes)
            torch.manual_seed(0)
            with deferred():
                model, _ = model_of(name)
            assert all(isinstance(one, DeferredTensor) for one in model.parameters())
            model.train()
            parallelize(model, mesh, Plan.from_hf(model).with_(zero=zero))
            assert torch.equal(torch.get_rng_state(), after)
            for wanted, found in (
                (parameters, values(model.named_parameters())),
                (buffers, values(model.named_buffers())),
            ):
                assert list(found) == list(wanted)
                assert all(torch.equal(found[one], wanted[one]) for one in wanted)
            assert model(**batch).loss.item() == pytest.approx(loss, rel=1e-5)
        with deferred():
            model, _ = model_of(name)
        load_pretrained(model, tmp_path / "theirs")
        parallelize(model, mesh, Plan.from_hf(model).with_(zero=3))
        found = values(model.named_parameters())
        assert all(torch.equal(found[one], parameters[one]) for one in parameters)
        save_pretrained(model, tmp_path / "ours", max_bytes=20_000)

    simulate(2)(rank)
    loaded = type(expected).from_pretrained(tmp_path / "ours")
    found = dict(loaded.named_parameters())
    assert all(torch.equal(found[one], parameters[one]) for one in parameters)
