"""Under the portable policy a draw has that policy's map or is refused: torch draws nothing.

The table has every operator that torch tags as random; a new one is noticed here.
"""

import pytest
import torch
import torch.distributions as D
import torch.nn.functional as F
import vescale_dtensor as vd
import vescale_rng
from torch.nn import init
from torch.utils._python_dispatch import TorchDispatchMode
from vescale_comm import simulate
from vescale_comm.testing import device_mesh
from vescale_dtensor import Shard

MAPPED = {
    "uniform_": lambda x: x.uniform_(),
    "normal_": lambda x: x.normal_(),
    "log_normal_": lambda x: x.log_normal_(),
    "exponential_": lambda x: x.exponential_(),
    "geometric_": lambda x: x.geometric_(0.3),
    "cauchy_": lambda x: x.cauchy_(),
    "random_": lambda x: x.random_(5),
    "bernoulli_": lambda x: x.bernoulli_(x.clone()),
    "bernoulli": torch.bernoulli,
    "normal": lambda x: torch.normal(x, x),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 5),
    "rand": lambda x: vd.rand(3, 2, device_mesh=x.device_mesh),
    "randn": lambda x: vd.randn(3, 2, device_mesh=x.device_mesh),
    "randint": lambda x: vd.randint(0, 9, (3, 2), device_mesh=x.device_mesh),
    "randperm": lambda x: vd.randperm(5, device_mesh=x.device_mesh),
    "multinomial": lambda x: torch.multinomial(x, 5, True),
    "dropout": lambda x: F.dropout(x, 0.3),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, True),
    "alpha_dropout_": lambda x: torch.alpha_dropout_(x, 0.3, True),
    "feature_dropout": lambda x: torch.feature_dropout(x, 0.3, True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.3, True),
    "feature_dropout_": lambda x: torch.feature_dropout_(x, 0.3, True),
    "feature_alpha_dropout_": lambda x: torch.feature_alpha_dropout_(x, 0.3, True),
    "gumbel_softmax": F.gumbel_softmax,
    "attention": lambda x: F.scaled_dot_product_attention(*[x[None, None]] * 3, dropout_p=0.3),
    "orthogonal_": init.orthogonal_,
    "trunc_normal_": init.trunc_normal_,
    "Normal": lambda x: D.Normal(x, x).sample(),
}
REFUSED = {
    "poisson": torch.poisson,
    "binomial": lambda x: torch.binomial(x * 0 + 3, x),
    "rrelu": lambda x: F.rrelu(x - 0.5, training=True),
    "rrelu_": lambda x: F.rrelu_(x - 0.5, training=True),
    "_standard_gamma": torch._standard_gamma,
    "_sample_dirichlet": torch._sample_dirichlet,
    "random": torch.ops.aten.random,
    "uniform": torch.ops.aten.uniform,
    "exponential": torch.ops.aten.exponential,
    "cauchy": torch.ops.aten.cauchy,
    "log_normal": torch.ops.aten.log_normal,
    "geometric": lambda x: torch.ops.aten.geometric(x, 0.3),
    "Gamma": lambda x: D.Gamma(x, x).sample(),
    "Beta": lambda x: D.Beta(x, x).sample(),
    "Dirichlet": lambda x: D.Dirichlet(x).sample(),
    "StudentT": lambda x: D.StudentT(x).sample(),
    "Poisson": lambda x: D.Poisson(x).sample(),
    "svd_lowrank": lambda x: torch.svd_lowrank(x, q=2),
    "fractional_max_pool2d": lambda x: F.fractional_max_pool2d(x[None, None], 1, output_size=1),
}
# Kernels that are reached through one of those above, and draw with a dropout only.
INNER = {
    *("_cudnn_rnn", "_lstm_mps", "gru", "lstm", "miopen_rnn", "rnn_relu", "rnn_tanh"),
    *("_cudnn_init_dropout_state", "_fill_mem_eff_dropout_mask_", "_fused_dropout", "dropout_"),
    *("rrelu_with_noise", "rrelu_with_noise_", "rrelu_with_noise_functional"),
    *("_nested_tensor_softmax_with_shape", "normal_functional"),
}


class Native(TorchDispatchMode):
    """What torch draws by itself, but for keys of the policy."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        generator = (kwargs or {}).get("generator")
        # Trials of the map on the installed torch have a generator of their own.
        own = generator is not None and generator is not torch.default_generator
        if torch.Tag.nondeterministic_seeded in func.tags and not own:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def drawn(rank, world_size):
    mesh, answers = device_mesh((world_size,), ("tp",)), {}
    values = torch.linspace(0.1, 0.9, 12).reshape(6, 2)
    for name, call in (MAPPED | REFUSED).items():
        torch.manual_seed(0)
        x = vd.distribute_tensor(values, mesh, [Shard(0)])
        call(x.clone())  # finds out how this torch draws
        with vescale_rng.use("portable"), Native() as native:
            try:
                call(x)
                answers[name] = native.found
            except vescale_rng.PolicyError as error:
                answers[name] = str(error)
    return answers


def test_torch_draws_nothing_under_the_portable_policy():
    for answers in simulate(2).run(drawn):
        for name in MAPPED:
            assert answers[name] == [], name
        for name in REFUSED:
            assert 'by the policy "native" only' in answers[name], name
            assert 'with use("native"):' in answers[name], name


def tagged():
    """The operators of ATen that torch tags as random, but for kernels of attention."""
    for whole in torch._C._dispatch_get_all_op_names():
        name, _, overload = whole.removeprefix("aten::").partition(".")
        op = getattr(getattr(torch.ops.aten, name, None), overload or "default", None)
        random = torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())
        if random and not any(word in name for word in ("attention", "sdp")):
            yield name


def test_the_table_has_every_operator_that_torch_tags():
    assert set(tagged()) - set(MAPPED) - set(REFUSED) - INNER == set()


@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (3, 2, 2)])
def test_orthogonal_of_portable_normals(shape):
    def program(rank, world_size):
        mesh = device_mesh((world_size,), ("tp",))
        torch.manual_seed(0)
        with vescale_rng.use("portable"):
            x = vd.distribute_tensor(torch.empty(shape), mesh, [Shard(0)])
            return init.orthogonal_(x, 2.0).full_tensor()

    torch.manual_seed(0)
    with vescale_rng.use("portable"):
        expected = vescale_rng.init.orthogonal_(torch.empty(shape), 2.0)
    for found in simulate(2).run(program):
        torch.testing.assert_close(found, expected)
