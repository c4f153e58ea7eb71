"""Random numbers of a shard of a tensor, equal to those of the global tensor.

Which call is yours:

- I hold rows 100 to 200 of a (1000, 64) tensor, in a torch tensor or a numpy array:
  `fill_(rows, Normal(), layout_of_slices((1000, 64), slice(100, 200)))`
- my ranks form a mesh: `layout_of(global_shape, placements, mesh_shape, coordinate)`
- my parts are of another form: `ShardLayout(global_shape, [Box(...), ...])`
- dropout of my rows: `dropout(x, 0.1, layout)`; initial values: `init.xavier_uniform_`, ...
- the same bits on every device and in every framework: `with use("portable"):` around the call
- torch's DTensor, FSDP2 or DDP: `with torch_dtensor.consistent(data=mesh["dp"]):`, nothing else

Every rank begins with the same seed, and calls each op in the same order, also where it holds
nothing: then all generators stay where one device's is.

What most programs need is here. `streams` has places in a generator's stream, `cuda` what only
CUDA has, `init` the initialisers of parameters, and `torch_dtensor` is for torch's own DTensor.

Reading guide, from below: `_errors`, `_arguments` (what each must be), `_policy`, `_distributions`
and `_layout` (geometry) know no generator; `_cpu`, `_cuda` and `_portable` draw, each by its own
map from places to numbers; `_draw` and `init` are the public functions on top of them, `_state` is
about where generators stand, and `_torch_dtensor` connects all of it to torch's DTensor. Imports
point down only. `_torch_versions` warns of a torch that was not tested.
"""

from vescale_rng import _torch_versions as _torch_versions
from vescale_rng import cuda, init, streams, torch_dtensor
from vescale_rng._distributions import (
    Bernoulli,
    Cauchy,
    Distribution,
    Exponential,
    Geometric,
    LogNormal,
    Normal,
    RandInt,
    Random,
    Uniform,
)
from vescale_rng._draw.data_dependent import binomial, poisson, rrelu
from vescale_rng._draw.dropout import dropout, native_dropout
from vescale_rng._draw.dropout_family import alpha_dropout, feature_alpha_dropout, feature_dropout
from vescale_rng._draw.factories import (
    gumbel_like,
    rand,
    rand_like,
    randint,
    randint_like,
    randn,
    randn_like,
)
from vescale_rng._draw.fill import fill_
from vescale_rng._draw.native_ops import no_native_draws
from vescale_rng._draw.probabilities import bernoulli, bernoulli_, normal
from vescale_rng._draw.sampling import multinomial, randperm
from vescale_rng._draw.truncated_normal import trunc_normal_
from vescale_rng._errors import (
    DeviceError,
    DistributionError,
    LayoutError,
    PolicyError,
    RngError,
    StateError,
)
from vescale_rng._layout.layout import Box, BoxLike, LayoutLike, ShardLayout, as_layout, whole
from vescale_rng._layout.of_tensor import layout_of_tensor
from vescale_rng._layout.placements import layout_of, layout_of_slices
from vescale_rng._policy import policy, use
from vescale_rng._state.agreement import check_in_step
from vescale_rng._state.json_state import get_state, set_state
from vescale_rng._version import __version__

__all__ = [
    "Bernoulli",
    "Box",
    "BoxLike",
    "Cauchy",
    "DeviceError",
    "Distribution",
    "DistributionError",
    "Exponential",
    "Geometric",
    "LayoutError",
    "LayoutLike",
    "LogNormal",
    "Normal",
    "PolicyError",
    "RandInt",
    "Random",
    "RngError",
    "ShardLayout",
    "StateError",
    "Uniform",
    "__version__",
    "alpha_dropout",
    "as_layout",
    "bernoulli",
    "bernoulli_",
    "binomial",
    "check_in_step",
    "cuda",
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
    "no_native_draws",
    "normal",
    "poisson",
    "policy",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
    "rrelu",
    "set_state",
    "streams",
    "torch_dtensor",
    "trunc_normal_",
    "use",
    "whole",
]
