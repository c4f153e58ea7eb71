"""A Hugging Face model by `Plan.from_hf` alone computes what it does on one device.

More than fifty architectures do so in the repository's integration tests, see MODELS.md; these are
one of each kind: a declared layout, none, experts, an encoder.
"""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stage_models import needs_transformers
from torch import nn
from vescale_comm import simulate, trace
from vescale_dtensor import Shard
from vescale_parallel import Plan, PlanError, mesh, parallelize
from vescale_parallel._cli.arguments import main

pytestmark = [pytest.mark.models, needs_transformers]
SIZES = {
    "vocab_size": 53,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 16,
}


def llama(**special: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**SIZES | {"num_key_value_heads": 2} | special)


def gpt2() -> Any:
    from transformers import GPT2Config

    return GPT2Config(vocab_size=53, n_positions=16, n_embd=24, n_layer=2, n_head=4)


def bert() -> Any:
    from transformers import BertConfig

    return BertConfig(**SIZES, architectures=["BertForMaskedLM"])


def mixtral() -> Any:
    from transformers import MixtralConfig

    return MixtralConfig(
        **SIZES | {"num_key_value_heads": 2, "num_local_experts": 3, "num_hidden_layers": 1}
    )


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "gpt2": gpt2,
    "bert": bert,
    "mixtral": mixtral,
}
MESHES = [({"tp": 4}, 0), ({"dp": 2, "tp": 2}, 0), ({"dp": 2, "tp": 2}, 3)]


def built(config: Any) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    kind = "AutoModelForMaskedLM" if config.model_type == "bert" else "AutoModelForCausalLM"
    return getattr(transformers, kind).from_config(config).train()


def tokens() -> torch.Tensor:
    return torch.randint(53, (5, 8), generator=torch.Generator().manual_seed(1))


def step(model: nn.Module) -> Any:
    torch.manual_seed(2)
    ids = tokens()
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    return out


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("sizes", "zero"), MESHES, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_gradients_are_those_of_one_device(
    name: str, sizes: dict[str, int], zero: int, sequence_parallel: bool
):
    plain = built(CONFIGS[name]())
    plan = Plan.from_hf(plain, zero=zero, sequence_parallel=sequence_parallel)
    assert Plan.from_toml(plan.to_toml()) == plan

    def program(rank: int, world_size: int) -> tuple[float, dict[str, torch.Tensor]]:
        model = parallelize(copy.deepcopy(plain), mesh(device_type="cpu", **sizes), plan)
        loss = step(model).loss.item()
        return loss, {key: one.grad.full_tensor() for key, one in model.named_parameters()}

    loss, gradients = simulate(4).run(program)[0]
    assert loss == pytest.approx(step(plain).loss.item(), rel=1e-5)
    for key, one in plain.named_parameters():
        message = {"msg": lambda text, key=key: f"{key}: {text}"}
        torch.testing.assert_close(gradients[key], one.grad, rtol=2e-4, atol=2e-6, **message)


def test_a_configuration_is_enough_and_no_value_is_stored():
    plan = Plan.from_hf(llama())
    assert dict(plan.parameters) == {
        "model.embed_tokens.weight": "tp:0",
        "*.{q,k,v,gate,up}_proj.weight": "tp:0",
        "*.{o,down}_proj.weight": "tp:1",
        "lm_head.weight": "tp:0",
        "*": "replicate",
    }
    assert Plan.from_hf(built(llama())) == plan
    # An architecture that is named, and one that is not.
    assert Plan.from_hf(bert()) == Plan.from_hf(built(bert()))
    assert Plan.from_hf(gpt2()) == Plan.from_hf(built(gpt2()))


def test_a_configuration_of_no_model_is_told():
    from transformers import PretrainedConfig

    with pytest.raises(PlanError, match=r"(?i)no model class is known for PretrainedConfig"):
        Plan.from_hf(PretrainedConfig())


@pytest.mark.parametrize("name", CONFIGS)
def test_every_rule_of_a_preset_applies(name: str):
    with torch.device("meta"):
        model = built(CONFIGS[name]())
    for sequence_parallel in (False, True):
        report = Plan.from_hf(model, sequence_parallel=sequence_parallel).check(model, {"tp": 2})
        assert not any("idle" in note for note in report.notes)
        assert report.bytes_per_rank < 0.7 * report.total_bytes


def counted(config: Any, **options: Any) -> tuple[dict[str, int], dict[str, int], Any]:
    """Collectives of a warm forward and backward of two layers on tp=4, and where logits lie."""
    plain = built(config)
    plan = Plan.from_hf(plain, **options)

    def program(rank: int, world_size: int) -> tuple[dict[str, int], dict[str, int], Any]:
        model = parallelize(copy.deepcopy(plain), mesh(tp=4, device_type="cpu"), plan)
        ids = tokens()
        for _ in range(2):  # first uses are compared between ranks
            model(input_ids=ids, labels=ids).loss.backward()
        with trace() as forward:
            out = model(input_ids=ids, labels=ids)
        with trace() as backward:
            out.loss.backward()
        return forward.counts(), backward.counts(), out.logits.placements

    return simulate(4).run(program)[0]


def test_llama_sends_what_megatron_sends():
    forward, backward, logits = counted(llama(num_key_value_heads=4))
    # Two sums a layer and one of the table; the loss over a sharded vocabulary takes two.
    assert forward == {"all_reduce": 2 * 2 + 1 + 2}
    # Two sums a layer, and one in front of the head.
    assert backward == {"all_reduce": 2 * 2 + 1}
    assert logits == (Shard(2),)


def test_llama_sends_what_megatron_sends_sequence_parallel():
    forward, backward, _ = counted(llama(num_key_value_heads=4), sequence_parallel=True)
    assert forward == {"reduce_scatter": 2 * 2 + 1, "all_gather": 2 * 2 + 1, "all_reduce": 2}
    assert backward == {"reduce_scatter": 2 * 2 + 1, "all_gather": 2 * 2 + 1}


def test_every_style_of_the_installed_library_has_a_meaning():
    from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES
    from vescale_parallel._plan.styles import EXPERTS, role_of

    styles = list(ALL_PARALLEL_STYLES.keys())
    assert "colwise" in styles
    for style in {*styles} - EXPERTS:
        role_of("layer", style)


@pytest.mark.parametrize("whole_folder", [False, True])
def test_the_command_line_reads_a_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], whole_folder: bool
):
    llama().save_pretrained(tmp_path)
    named = str(tmp_path if whole_folder else tmp_path / "config.json")
    assert main(["plan", named, "--mesh", "dp=2,tp=4", "--json", "--sequence-parallel"]) == 0
    found = json.loads(capsys.readouterr().out)["plan"]
    # Two heads of keys are not shared by four ranks.
    assert found["parameters"]["*.{q,gate,up}_proj.weight"] == "tp:0"
    assert found["activations"]["*.{o,down}_proj"] == "-> tp:1"
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
    assert main(["plan", named, "--mesh", "dp=2"]) == 2
    assert "is no Hugging Face configuration" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["made_up", "llama"])
def test_code_beside_a_configuration_is_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
):
    proof, folder = tmp_path / "executed", tmp_path / "model"
    folder.mkdir()
    # Where it is imported, where it is asked for a configuration, and as what builds the model.
    for name in ("configuration_x", "modeling_x"):
        (folder / f"{name}.py").write_text(f"open({str(proof)!r}, 'w')\n")
    said = {
        "model_type": kind,
        "architectures": ["Trainer", "pipeline", "set_seed"],
        "auto_map": {"AutoConfig": "configuration_x.X", "AutoModel": "modeling_x.X"},
        **{"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 8},
    }
    (folder / "config.json").write_text(json.dumps(said))
    status = main(["plan", str(folder), "--mesh", "dp=2"])
    assert (status == 0) == (kind == "llama"), capsys.readouterr().err
    assert not proof.exists()
