"""Property: every public name is there, once, and takes what it took.

A name may be added here. One that is taken away, or that comes to mean another object, breaks
somebody's program.
"""

import ast
import importlib
import inspect
from pathlib import Path

import pytest
import vescale_rng

NAMES = [
    "Bernoulli", "Box", "BoxLike", "Cauchy", "DeviceError", "Distribution", "DistributionError",
    "Exponential", "Geometric", "ShardLayout", "LayoutError", "LayoutLike", "LogNormal",
    "Normal", "PolicyError", "RandInt", "Random", "RngError", "StateError", "Uniform",
    "__version__", "alpha_dropout", "as_layout", "bernoulli", "bernoulli_", "binomial",
    "check_in_step", "cuda", "dropout", "feature_alpha_dropout", "feature_dropout", "fill_",
    "get_state", "gumbel_like", "init", "layout_of", "layout_of_slices", "layout_of_tensor",
    "multinomial", "native_dropout", "no_native_draws", "normal", "poisson", "policy", "rand",
    "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm", "rrelu",
    "set_state", "streams", "torch_dtensor", "trunc_normal_", "use", "whole",
]  # fmt: skip
GROUPS = {
    "cuda": [
        "CudaPosition", "GraphGenerator", "threads_of", "use_threads",
    ],
    "streams": [
        "BernoulliOf", "Dropout", "Multinomial", "Position", "RandPerm", "advance", "at",
        "draws", "fingerprint", "position", "seek", "skip",
    ],
}  # fmt: skip
# What functions take, and which ones take it.
SIGNATURES = {
    "words generator": "streams.advance",
    "local p layout generator": (
        "alpha_dropout bernoulli_ dropout feature_alpha_dropout feature_dropout"
    ),
    "layout": "as_layout",
    "place generator": "streams.at streams.seek",
    "input layout generator p": "bernoulli",
    "count probabilities layout generator": "binomial",
    "generator group": "check_in_step",
    "distribution shape dtype memory_order cached device": "streams.draws",
    "local distribution layout generator": "fill_",
    "generator": "get_state streams.position",
    "local layout generator": "gumbel_like",
    "global_shape slices memory_order local_strides": "layout_of_slices",
    "global_shape placements mesh_shape coordinate memory_order local_strides": "layout_of",
    "tensor": "layout_of_tensor",
    "probabilities num_samples replacement layout generator": "multinomial",
    "local p train layout generator": "native_dropout",
    "mean std layout generator": "normal",
    "rates layout generator": "poisson",
    "": "policy",
    "layout dtype device generator": "rand randn",
    "local layout dtype generator": "rand_like randn_like",
    "low high layout dtype device generator": "randint",
    "local low high layout dtype generator": "randint_like",
    "n layout dtype generator": "randperm",
    "input layout lower upper generator": "rrelu",
    "state generator": "set_state",
    "distribution shape dtype memory_order generator": "streams.skip",
    "device": "cuda.threads_of",
    "local mean std a b generator layout": "trunc_normal_ init.trunc_normal_",
    "name": "use",
    "threads device": "cuda.use_threads",
    "shape memory_order": "whole",
    "local a mode nonlinearity generator layout": "init.kaiming_normal_ init.kaiming_uniform_",
    "local mean std generator layout": "init.normal_",
    "local gain generator layout": "init.orthogonal_ init.xavier_normal_ init.xavier_uniform_",
    "local a b generator layout": "init.uniform_",
}
PARAMETERS = {name: taken for taken, names in SIGNATURES.items() for name in names.split()}
SOURCE = Path(vescale_rng.__file__).parent


def test_every_public_name_is_there():
    assert sorted(vescale_rng.__all__) == sorted(NAMES)
    for name in vescale_rng.__all__:
        assert getattr(vescale_rng, name) is not None, name


def test_the_submodules_keep_their_names():
    public = {name.removeprefix("init.") for name in PARAMETERS if name.startswith("init.")}
    assert {*vescale_rng.init.__all__} == public
    assert (
        vescale_rng.torch_dtensor.consistent
        is importlib.import_module("vescale_rng.torch_dtensor").consistent
    )


@pytest.mark.parametrize("group", GROUPS)
def test_a_name_of_a_group_is_nowhere_else(group):
    module = importlib.import_module(f"vescale_rng.{group}")
    assert module is getattr(vescale_rng, group)
    assert sorted(module.__all__) == sorted(GROUPS[group])
    assert not {*module.__all__} & {*vescale_rng.__all__}
    assert not any(hasattr(vescale_rng, name) for name in module.__all__)


def test_classes_stay_classes_and_functions_functions():
    for name in NAMES:
        meaning = getattr(vescale_rng, name)
        if name not in ("__version__", "cuda", "init", "streams", "torch_dtensor"):
            assert isinstance(meaning, type) == name[0].isupper(), name


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_function_takes_what_it_took(name):
    """Parameters keep their names and their order; new ones are optional and keyword-only."""
    module, _, function = name.rpartition(".")
    owner = getattr(vescale_rng, module) if module else vescale_rng
    found = inspect.signature(getattr(owner, function)).parameters
    assert [one for one in found if one in PARAMETERS[name].split()] == PARAMETERS[name].split()
    for one in set(found) - {*PARAMETERS[name].split()}:
        assert found[one].default is not inspect.Parameter.empty
        assert found[one].kind is inspect.Parameter.KEYWORD_ONLY


def test_every_public_name_is_documented():
    for name in NAMES:
        if name != "__version__":
            assert (getattr(vescale_rng, name).__doc__ or "").strip(), name


def test_every_room_has_a_purpose_and_a_guide():
    for room in sorted(path.parent for path in SOURCE.rglob("__init__.py")):
        text = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
        assert "guide" in text, f"{room.name}: its __init__ tells no reader where to start"
        modules = {path.stem for path in room.glob("*.py")} - {"__init__", "_version"}
        missing = {name for name in modules if name not in text}
        assert not missing, f"{room.name}: the guide leaves out {sorted(missing)}"
