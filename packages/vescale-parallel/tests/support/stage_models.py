"""Small unmodified models of Hugging Face, with dropout, for tests of stages."""

import importlib.util

import pytest
import torch
from torch import nn

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=4, n_embd=16, n_head=2, vocab_size=32, n_positions=16)
    return GPT2LMHeadModel(config).train()


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=4,
        hidden_size=16,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=32,
        attention_dropout=0.1,
    )
    return LlamaForCausalLM(config).train()
