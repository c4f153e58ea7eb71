"""A preset prints as the rules that a person would have written, and every rule of it applies."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from vescale_parallel import Pipeline, Plan, PlanError, Zero
from vescale_parallel.train.model import Decoder, ModelConfig

MESH = {"dp": 2, "tp": 2}
CONFIG = ModelConfig(vocab=32, dim=16, layers=3, heads=4, kv_heads=2, hidden=24, context=8)


class Attention(nn.Module):
    """Named as in many files of people's own."""

    def __init__(self, width: int = 12, names: str = "qkvo") -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(width, width))


class Block(nn.Module):
    """Attention and two layers whose names say nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.norm = Attention(), nn.LayerNorm(12)
        self.ff = nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 12))
        self.gate, self.latent = nn.Linear(12, 4), nn.Linear(12, 3)


class Model(nn.Module):
    """Blocks between a table and a head."""

    def __init__(self, vocabulary: bool = True, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        if vocabulary:
            self.tokens, self.positions = nn.Embedding(30, 12), nn.Embedding(40, 12)
            self.head = nn.Linear(12, 30)

    def forward(self, x: Tensor) -> Tensor:
        return x


def layouts(plan: Plan, model: nn.Module) -> dict[str, str]:
    return {name: str(r.layout) for r in plan.check(model, MESH).parameters for name in r.names}


def test_a_decoder_of_ones_own():
    with torch.device("meta"):
        model = Decoder(CONFIG)
    plan = Plan.for_decoder(model)
    assert dict(plan.parameters) == {
        "{embed,head}.weight": "tp:0",
        "*.{q,k,v,gate,up}.weight": "tp:0",
        "*.{out,down}.weight": "tp:1",
        "*": "replicate",
    }
    assert plan == Plan(parameters=dict(plan.parameters))
    plan.check(model, MESH)


def test_sequence_parallel_rules():
    plan = Plan.for_decoder(Decoder(CONFIG), sequence_parallel=True, zero=3)
    assert plan.zero == Zero(3)
    assert dict(plan.activations) == {
        "embed": "-> tp:1",
        "*.{attention,mlp}": "tp:full ->",
        "*.{out,down}": "-> tp:1",
        "head": "tp:full ->",
    }


def test_names_shapes_and_what_is_left_alone():
    model = Model()
    found = layouts(Plan.for_decoder(model, axis="tp"), model)
    block = "blocks.1"
    assert {found[f"{block}.attn.{name}.weight"] for name in "qkv"} == {"tp:0"}
    assert found[f"{block}.attn.o.weight"] == "tp:1"
    assert found[f"{block}.attn.q.bias"] == "tp:0"
    assert found[f"{block}.attn.o.bias"] == "replicate"
    # By shape: away from the width of the model, and back to it.
    assert found[f"{block}.ff.0.weight"] == "tp:0"
    assert found[f"{block}.ff.2.weight"] == "tp:1"
    # A router, a latent projection, a norm, a table of positions that is longer than the other.
    for name in (f"{block}.gate", f"{block}.latent", f"{block}.norm", "positions"):
        assert found[f"{name}.weight"] == "replicate"
    assert found["tokens.weight"] == "tp:0"
    assert found["head.weight"] == found["head.bias"] == "tp:0"


def test_another_axis():
    plan = Plan.for_encoder(Model(), axis="model", axes=("dp", "model"))
    assert "model:0" in plan.parameters.values()
    assert not any("tp" in text for text in plan.parameters.values())


def test_without_a_vocabulary():
    model = Model(vocabulary=False)
    assert Plan.for_vit(model) == Plan.for_encoder(model)
    with pytest.raises(PlanError, match=r"no nn\.Embedding of a vocabulary"):
        Plan.for_decoder(model)


def test_nothing_to_find_is_an_error_that_says_what_to_write():
    with pytest.raises(PlanError, match="has no blocks"):
        Plan.for_encoder(nn.Sequential(nn.Linear(3, 4)))
    with pytest.raises(PlanError, match="no layer is recognised"):
        Plan.for_encoder(nn.ModuleDict({"layers": nn.ModuleList([nn.LayerNorm(4)])}))


class Recurrent(nn.Module):
    """Something else than products: its features are not heads."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj, self.conv = nn.Linear(12, 24), nn.Conv1d(24, 24, 3)
        self.out_proj = nn.Linear(24, 12)


def test_layers_around_a_convolution_are_whole():
    model = Model()
    for block in model.blocks:
        block.mixer = Recurrent()
    found = layouts(Plan.for_decoder(model), model)
    assert found["blocks.0.mixer.in_proj.weight"] == "replicate"
    assert found["blocks.0.attn.q.weight"] == "tp:0"


class Declared(Model):
    """Declares a layout as Hugging Face's models do."""

    config = SimpleNamespace(model_type="toy", num_key_value_heads=2)

    def __init__(self, **plan: str) -> None:
        super().__init__()
        base = {f"blocks.*.attn.{name}": "colwise" for name in "qkv"}
        self.tp_plan = base | {"blocks.*.attn.o": "rowwise"} | plan


def test_what_is_declared_and_nothing_else_inside_of_blocks():
    model = Declared(tokens="rowwise", **{"blocks.*.norm": "replicated_with_grad_allreduce"})
    found = layouts(Plan.from_hf(model), model)
    assert found["blocks.0.attn.q.weight"] == "tp:0"
    assert found["blocks.0.attn.o.weight"] == "tp:1"
    assert found["blocks.0.ff.0.weight"] == "replicate"
    # Rows of a table are its vocabulary; the head is added.
    assert found["tokens.weight"] == found["head.weight"] == "tp:0"


def test_stages_are_the_declared_blocks():
    model = Declared()
    model.config = SimpleNamespace(
        model_type="toy",
        base_model_pp_plan={"tokens": (["ids"], ["x"]), "blocks": (["x"], ["x"]), "gone": ([], [])},
    )
    assert Plan.from_hf(model, pipeline="zbv").pipeline == Pipeline("zbv", stages="blocks.*")
    own = Pipeline(stages="blocks.?")
    assert Plan.from_hf(model, pipeline=own).pipeline == own
    assert Plan.from_hf(Declared(), pipeline="zbv").pipeline == Pipeline("zbv")
    assert Plan.from_hf(model).pipeline is None


def test_styles_are_replaced_and_added():
    model = Declared()
    plan = Plan.from_hf(model, styles={"blocks.*.attn.v": "replicate", "blocks.*.ff.0": "colwise"})
    found = layouts(plan, model)
    assert found["blocks.0.attn.v.weight"] == "replicate"
    assert found["blocks.0.ff.0.weight"] == "tp:0"


def test_a_style_that_nobody_knows():
    with pytest.raises(PlanError, match=r"'blocks.0.ff.0': 'colwize'.*Did you mean 'colwise'?"):
        Plan.from_hf(Declared(**{"blocks.*.ff.0": "colwize"}))


def test_fewer_heads_of_keys_than_ranks():
    model = Declared()
    assert layouts(Plan.from_hf(model, mesh={"tp": 2}), model)["blocks.0.attn.k.weight"] == "tp:0"
    found = layouts(Plan.from_hf(model, mesh={"dp": 2, "tp": 4}), model)
    assert found["blocks.0.attn.k.weight"] == found["blocks.0.attn.v.bias"] == "replicate"
    assert found["blocks.0.attn.q.weight"] == "tp:0"


def test_ties_agree_and_layers_that_differ_are_told_one_by_one():
    model = Declared(**{"blocks.0.ff.0": "colwise"})
    model.head.weight = model.tokens.weight
    model.head.bias = model.blocks[1].ff[0].bias
    plan = Plan.from_hf(model)
    found = layouts(plan, model)
    assert found["blocks.0.ff.0.weight"] == "tp:0"
    assert found["blocks.1.ff.0.weight"] == "replicate"
    assert found["head.bias"] == found["blocks.1.ff.0.bias"] == "tp:0"


class Adapted(nn.Module):
    """As PEFT's LoRA: the layer inside, two narrow ones beside it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(layer.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, layer.out_features, bias=False)})


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("declared", [False, True])
def test_adapters_leave_the_layout_of_what_they_adapt(declared: bool, wrapped: bool):
    model: nn.Module = Declared() if declared else Model()
    for block in model.blocks:
        block.attn.q, block.attn.o = Adapted(block.attn.q), Adapted(block.attn.o)
    before = "base_model.model." if wrapped else ""
    if wrapped:
        outer = nn.ModuleDict({"base_model": nn.ModuleDict({"model": model})})
        outer.config, outer.tp_plan = SimpleNamespace(), getattr(model, "tp_plan", {})
        model = outer
    for sequence_parallel in (False, True):
        plan = Plan.from_hf(model, sequence_parallel=sequence_parallel)
        found = layouts(plan, model)
        attention = f"{before}blocks.1.attn"
        assert found[f"{attention}.q.base_layer.weight"] == "tp:0"
        assert found[f"{attention}.v.weight"] == "tp:0"
        assert found[f"{attention}.o.base_layer.weight"] == "tp:1"
        for name in ("q.lora_A", "q.lora_B", "o.lora_A", "o.lora_B"):
            assert found[f"{attention}.{name}.default.weight"] == "replicate"


@pytest.mark.parametrize("what", [None, 3, {"parameters": {}}])
def test_what_is_no_model(what: object):
    with pytest.raises(PlanError, match="takes a model or a Hugging Face configuration"):
        Plan.from_hf(what)


def test_unknown_fields_are_refused():
    with pytest.raises(PlanError, match=r"no 'zerro'\. Did you mean 'zero'"):
        Plan.for_decoder(Model(), zerro=3)
