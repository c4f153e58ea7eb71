"""Draws into CPU tensors do not depend on torch's default device, nor do later ones.

On "meta" nothing is drawn: memory that is made there by mistake fails, or measures that an op
takes no words, which would be kept. "cuda" as the default device goes the same way.
"""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import vescale_rng as rng

ROWS = rng.layout_of_slices((12, 5), slice(3, 7))
PLACES = rng.layout_of_slices((80,), slice(3, 43))


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, device="cpu")


def even(count: int) -> torch.Tensor:
    return torch.full((count,), 0.5, device="cpu")


CASES: dict[str, Callable[[], Any]] = {
    "fill": lambda: rng.fill_(ones(40), rng.Normal(0.1, 0.3), PLACES),
    "fill in another dtype": lambda: rng.fill_(ones(40).half(), rng.Uniform(1, 2), PLACES),
    "fill beside": lambda: rng.fill_(
        ones(12, 2), rng.Normal(), rng.layout_of_slices((12, 5), (slice(None), slice(1, 3)))
    ),
    "dropout": lambda: rng.dropout(ones(40), 0.1, PLACES),
    "native_dropout": lambda: rng.native_dropout(ones(40), 0.1, True, PLACES)[0],
    "feature_alpha_dropout": lambda: rng.feature_alpha_dropout(ones(4, 5), 0.3, ROWS),
    "bernoulli_": lambda: rng.bernoulli_(ones(40), even(40), PLACES),
    "normal": lambda: rng.normal(ones(40), 1.0, PLACES),
    "gumbel_like": lambda: rng.gumbel_like(ones(4, 5), ROWS),
    "trunc_normal_": lambda: rng.init.trunc_normal_(ones(40), layout=PLACES),
    "trunc_normal_ by uniforms": lambda: rng.init.trunc_normal_(ones(40), a=1, layout=PLACES),
    "orthogonal_": lambda: rng.init.orthogonal_(ones(4, 5), layout=ROWS),
    "multinomial": lambda: rng.multinomial(ones(4, 5), 2, layout=ROWS),
    "multinomial again and again": lambda: rng.multinomial(ones(4, 5), 2, True, layout=ROWS),
    "randperm": lambda: rng.randperm(40),
    "poisson": lambda: rng.poisson(ones(40), rng.whole((40,))),
    "skip": lambda: rng.streams.skip(rng.Normal(), (40,)),
    "draws": lambda: [
        rng.streams.draws(op, (4, 5))
        for op in (
            rng.Normal(),
            rng.streams.RandPerm(),
            rng.streams.BernoulliOf(),
            rng.streams.Multinomial(2, True),
        )
    ],
}


def forget() -> None:
    """Empty every cache of the package: what was found out earlier would hide the question."""
    for name, module in list(sys.modules.items()):
        if name.startswith("vescale_rng"):
            for value in vars(module).values():
                if callable(getattr(value, "cache_clear", None)):
                    value.cache_clear()


def run(draw: Callable[[], Any], policy: str, default: str) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(3)
    with torch.device(default), rng.use(policy):
        drawn = draw()
    return drawn, torch.get_rng_state()


@pytest.mark.parametrize("policy", ["native", "portable"])
@pytest.mark.parametrize("name", CASES)
def test_the_default_device_is_nothing_to_a_draw_on_cpu(name: str, policy: str) -> None:
    if (name, policy) == ("poisson", "portable"):
        with pytest.raises(rng.PolicyError):
            run(CASES[name], policy, "meta")
        return
    want, state = run(CASES[name], policy, "cpu")
    forget()
    # In the block, and then outside of it, with what was found out in the block.
    for default in ("meta", "cpu"):
        found, after = run(CASES[name], policy, default)
        assert torch.equal(after, state)
        if isinstance(want, torch.Tensor):
            assert found.device.type == "cpu"
            assert torch.equal(found, want)
        else:
            assert found == want
