"""Property: every public name of 0.1 is still there, and the groups offer the same objects.

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
    "Bernoulli",
    "BernoulliOf",
    "Box",
    "BoxLike",
    "Cauchy",
    "CudaPosition",
    "DeviceError",
    "Distribution",
    "DistributionError",
    "Dropout",
    "Exponential",
    "Geometric",
    "GraphGenerator",
    "ShardLayout",
    "LayoutError",
    "LayoutLike",
    "LogNormal",
    "Multinomial",
    "Normal",
    "PolicyError",
    "Position",
    "RandInt",
    "RandPerm",
    "Random",
    "RngError",
    "StateError",
    "Uniform",
    "__version__",
    "advance",
    "alpha_dropout",
    "as_layout",
    "at",
    "bernoulli",
    "bernoulli_",
    "binomial",
    "check_in_step",
    "draws",
    "dropout",
    "feature_alpha_dropout",
    "feature_dropout",
    "fill_",
    "get_state",
    "gumbel_like",
    "init",
    "layout_of",
    "layout_of_slices",
    "layout_of_tensor",
    "multinomial",
    "native_dropout",
    "normal",
    "poisson",
    "policy",
    "position",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
    "rrelu",
    "seek",
    "set_state",
    "skip",
    "threads_of",
    "torch_dtensor",
    "trunc_normal_",
    "use",
    "use_threads",
    "whole",
]
INIT = [
    "kaiming_normal_",
    "kaiming_uniform_",
    "normal_",
    "orthogonal_",
    "trunc_normal_",
    "uniform_",
    "xavier_normal_",
    "xavier_uniform_",
]
PARAMETERS = {
    "advance": "words generator",
    "alpha_dropout": "local p layout generator",
    "as_layout": "layout",
    "at": "place generator",
    "bernoulli": "input layout generator p",
    "bernoulli_": "local p layout generator",
    "binomial": "count probabilities layout generator",
    "check_in_step": "generator group",
    "draws": "distribution shape dtype memory_order cached device",
    "dropout": "local p layout generator",
    "feature_alpha_dropout": "local p layout generator",
    "feature_dropout": "local p layout generator",
    "fill_": "local distribution layout generator",
    "get_state": "generator",
    "gumbel_like": "local layout generator",
    "layout_of_slices": "global_shape slices memory_order local_strides",
    "layout_of": "global_shape placements mesh_shape coordinate memory_order local_strides",
    "layout_of_tensor": "tensor",
    "multinomial": "probabilities num_samples replacement layout generator",
    "native_dropout": "local p train layout generator",
    "normal": "mean std layout generator",
    "poisson": "rates layout generator",
    "policy": "",
    "position": "generator",
    "rand": "layout dtype device generator",
    "rand_like": "local layout dtype generator",
    "randint": "low high layout dtype device generator",
    "randint_like": "local low high layout dtype generator",
    "randn": "layout dtype device generator",
    "randn_like": "local layout dtype generator",
    "randperm": "n layout dtype generator",
    "rrelu": "input layout lower upper generator",
    "seek": "place generator",
    "set_state": "state generator",
    "skip": "distribution shape dtype memory_order generator",
    "threads_of": "device",
    "trunc_normal_": "local mean std a b generator layout",
    "use": "name",
    "use_threads": "threads device",
    "whole": "shape memory_order",
    "init.kaiming_normal_": "local a mode nonlinearity generator layout",
    "init.kaiming_uniform_": "local a mode nonlinearity generator layout",
    "init.normal_": "local mean std generator layout",
    "init.orthogonal_": "local gain generator layout",
    "init.trunc_normal_": "local mean std a b generator layout",
    "init.uniform_": "local a b generator layout",
    "init.xavier_normal_": "local gain generator layout",
    "init.xavier_uniform_": "local gain generator layout",
}
GROUPS = ["cuda", "distributions", "errors", "layouts", "streams"]
SOURCE = Path(vescale_rng.__file__).parent


def test_every_public_name_is_there():
    assert set(NAMES) <= set(vescale_rng.__all__)
    assert sorted(vescale_rng.__all__) == sorted(set(vescale_rng.__all__))
    for name in vescale_rng.__all__:
        assert getattr(vescale_rng, name) is not None, name


def test_the_submodules_keep_their_names():
    assert sorted(vescale_rng.init.__all__) == INIT
    assert (
        vescale_rng.torch_dtensor.consistent
        is importlib.import_module("vescale_rng.torch_dtensor").consistent
    )


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_offers_the_same_objects(group):
    module = importlib.import_module(f"vescale_rng.{group}")
    assert module is getattr(vescale_rng, group)
    for name in module.__all__:
        assert getattr(module, name) is getattr(vescale_rng, name), name


def test_the_groups_share_no_name():
    grouped = [name for group in GROUPS for name in getattr(vescale_rng, group).__all__]
    assert len(grouped) == len(set(grouped))


def test_classes_stay_classes_and_functions_functions():
    for name in NAMES:
        meaning = getattr(vescale_rng, name)
        if name not in ("__version__", "init", "torch_dtensor"):
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
    for name in [*NAMES, *GROUPS]:
        if name != "__version__":
            assert (getattr(vescale_rng, name).__doc__ or "").strip(), name


def test_every_room_has_a_purpose_and_a_guide():
    for room in sorted(path.parent for path in SOURCE.rglob("__init__.py")):
        text = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
        assert "guide" in text, f"{room.name}: its __init__ tells no reader where to start"
        modules = {path.stem for path in room.glob("*.py")} - {"__init__", "_version"}
        missing = {name for name in modules if name not in text}
        assert not missing, f"{room.name}: the guide leaves out {sorted(missing)}"


@pytest.mark.parametrize("module", [vescale_rng, vescale_rng.layouts], ids=lambda m: m.__name__)
def test_a_name_that_was_changed_goes_on_working_with_a_warning(module):
    with pytest.warns(DeprecationWarning, match="Layout is called ShardLayout now") as caught:
        assert module.Layout is vescale_rng.ShardLayout
    assert caught[0].filename == __file__
    assert "Layout" not in module.__all__
    with pytest.raises(AttributeError, match="no attribute 'NoSuchName'"):
        module.NoSuchName  # noqa: B018
