"""The public names are a list that only grows, each is documented, and each module says its use."""

import ast
import dataclasses
import inspect
from pathlib import Path

import pytest
import vescale_parallel

# What a release has promised. A name may be added; one that leaves breaks somebody's import.
PUBLIC = {
    "BoundaryRow": ["boundary", "module", "rule"],
    "BufferRow": [
        *("compute", "dtype", "gather_bytes", "gathered_bytes", "gradient_bytes", "host_bytes"),
        *("offload", "owned"),
        *(
            "packed_bytes",
            "plan",
            "reduce",
            "reduce_bytes",
            "shard_bytes",
            "stored_bytes",
            "stored_on",
        ),
        *("trainable", "unit", "zero"),
    ],
    "CapturedUnit": ["name", "programs", "refusal", "replays"],
    "DeferredError": [],
    "DisagreementError": [],
    "Experts": ["forward", "reset_parameters"],
    "GraphError": [],
    "MemoryPlanError": [],
    "Loader": ["load_state_dict", "set_epoch", "state_dict"],
    "MeshError": [],
    "MoE": ["forward"],
    "ParallelError": [],
    "ParameterRow": [
        *("compute", "dtype", "global_shape", "layout", "local_bytes", "local_shape", "name"),
        *("names", "offload", "owned", "reduce", "rule", "uneven", "unit", "zero"),
    ],
    "PipelineError": [],
    "Plan": [
        *("activations", "annotate", "axes", "batch", "batch_is", "behind", "block", "check"),
        *("checkpoint", "data_parallel", "deterministic"),
        *(
            "experts",
            "explain",
            "for_decoder",
            "for_encoder",
            "for_vit",
            "from_hf",
            "from_json",
            "from_toml",
        ),
        *(
            "microbatches",
            "offload",
            "over",
            "owned",
            "parameters",
            "pipeline",
            "precision",
            "prefetch",
        ),
        *("redistribute", "search", "sequence"),
        *("shard", "shards", "to_json", "to_toml", "units", "with_", "zero"),
    ],
    "PlanError": [],
    "PretrainedError": [],
    "Report": [
        *("activations", "batch", "batch_is", "behind", "boundaries", "budget", "buffers"),
        *("bytes_per_rank", "captured", "cast_buffers", "cost", "experts", "invariant", "mesh"),
        *(
            "microbatches",
            "notes",
            "over",
            "parameters",
            "regions",
            "sequence",
            "split",
            "total_bytes",
        ),
        "unpriced",
    ],
    "Router": ["forward", "reset_parameters", "update_balance"],
    "Routing": ["chosen", "load", "logits", "weights"],
    "StaleParameterError": [],
    "TrainError": [],
    "__version__": [],
    "balance_experts": ["bucket_bytes", "loads", "model", "most"],
    "balance_loss": ["routing"],
    "captured_units": ["model"],
    "clip_grad_norm_": ["max_norm", "model", "norm_type"],
    "deferred": [],
    "distribute_batch": ["model", "values"],
    "forward_backward": ["args", "kwargs", "loss", "model"],
    "load_pretrained": ["cast", "folder", "model"],
    "materialize": ["model"],
    "loader": [
        *("batch_sampler", "batch_size", "collate_fn", "dataset", "drop_last", "generator"),
        *("loader_type", "mesh", "options", "plan", "sampler", "shuffle"),
    ],
    "mesh": ["device_type", "sizes", "timeout"],
    "no_sync": ["model"],
    "parallelize": ["bucket_bytes", "mesh", "model", "plan", "static"],
    "save_pretrained": ["folder", "max_bytes", "model"],
    "sum_over_shards": ["args", "function", "kwargs", "model"],
    "through_forward": ["args", "kwargs", "method", "model"],
    "z_loss": ["routing"],
}
SOURCES = sorted(Path(vescale_parallel.__file__).parent.rglob("*.py"))


def members(name: str) -> list[str]:
    """The parameters of a function; the fields, methods and properties of a class of ours."""
    value = getattr(vescale_parallel, name)
    if inspect.isfunction(value):
        return sorted(inspect.signature(value).parameters)
    if not inspect.isclass(value) or issubclass(value, Exception):
        return []
    declared = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    fields = {field.name for field in declared}
    return sorted(fields | {one for one in vars(value) if not one.startswith("_")})


def test_every_promised_name_is_exported_and_no_other():
    assert sorted(vescale_parallel.__all__) == sorted(PUBLIC)
    for name in PUBLIC:
        assert getattr(vescale_parallel, name, None) is not None


@pytest.mark.parametrize("name", PUBLIC)
def test_members_and_parameters_are_those_that_were_promised(name: str):
    assert members(name) == PUBLIC[name]


@pytest.mark.parametrize("name", sorted({*PUBLIC} - {"__version__"}))
def test_public_names_are_documented(name: str):
    value = getattr(vescale_parallel, name)
    assert inspect.getdoc(value)
    assert value.__module__.startswith("vescale_parallel")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_every_module_says_what_it_is_for(path: Path):
    assert ast.get_docstring(ast.parse(path.read_text()))
