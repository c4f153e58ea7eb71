"""Unmodified Hugging Face models are captured, and train bit for bit as they do in eager."""

import importlib.util

import pytest
import torch
import vescale_dtensor as vd
from torch import nn
from vescale_comm.testing import device_mesh, on_ranks
from vescale_dtensor import Replicate, Shard

pytestmark = [
    pytest.mark.models,
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
    ),
]
STEPS = 4
LAYOUT = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "gate_proj": 0, "up_proj": 0}
LAYOUT |= {"o_proj": 1, "down_proj": 1, "c_fc": 1}


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=16,
            attention_dropout=0.1,
        )
    )


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=4, n_inner=24)
    )


MODELS = {"llama": llama, "gpt2": gpt2}


def built(name, mesh):
    torch.manual_seed(0)
    model = MODELS[name]()
    for path, parameter in list(model.named_parameters()):
        owner, _, leaf = path.rpartition(".")
        dim = LAYOUT.get(owner.rpartition(".")[2])
        if dim is None or leaf != "weight":
            continue
        layout = [Replicate(), Shard(dim)]
        whole = vd.distribute_tensor(parameter.detach(), mesh, layout, src_data_rank=None)
        setattr(model.get_submodule(owner), leaf, nn.Parameter(whole))
    return vd.distribute_module(model, mesh)


@pytest.mark.parametrize("name", sorted(MODELS))
@on_ranks(4, timeout=200)
def test_trains_as_in_eager(name):
    mesh = device_mesh((2, 2), ("dp", "tp"))
    model, twin = built(name, mesh), built(name, mesh)
    captured = vd.capture(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, twin)]
    for step in range(STEPS):
        ids = torch.randint(32, (3, 6), generator=torch.Generator().manual_seed(step))
        ids = vd.distribute_tensor(ids, mesh, [Shard(0), Replicate()], src_data_rank=None)
        losses = []
        for forward, optimizer in zip((captured, twin), optimizers, strict=True):
            optimizer.zero_grad()
            torch.manual_seed(step)
            out = forward(input_ids=ids, labels=ids, use_cache=False)
            out.loss.backward()
            optimizer.step()
            losses.append((out.loss.item(), out.logits._local_tensor.detach()))
        assert losses[0][0] == losses[1][0]
        assert torch.equal(losses[0][1], losses[1][1])
        for one, two in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(one._local_tensor, two._local_tensor)
    assert len(captured.programs) == 1
