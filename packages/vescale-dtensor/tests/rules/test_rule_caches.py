"""Nothing that followed from the rules before a registration is used after it."""

import torch
import vescale_dtensor as vd
from taught_rules import Asked, on_two_ranks
from vescale_dtensor._dispatch import registry
from vescale_dtensor._torch.bounded_cache import BoundedCache
from vescale_dtensor.rules import register_rule


def caches():
    """Every bounded cache that is alive, by what follows from rules: calls, plans, and lists."""
    ours = ("_dispatch", "_fast_path")
    modules = [m for name, m in vars(vd).items() if name in ours]
    return {
        f"{module.__name__}.{name}": value
        for package in modules
        for module in vars(package).values()
        for name, value in getattr(module, "__dict__", {}).items()
        if isinstance(value, BoundedCache)
    }


def test_every_cache_is_empty_after_register_rule():
    captured = vd.capture(lambda x: torch.hypot(x, x))

    def program(x):
        for _ in range(3):
            torch.hypot(x, x), x.mul(2.0), x[0], x.clone().abs_(), x.reshape(4, 5), x + x.cos()
            torch.cat([x, x]), torch._foreach_mul([x], 2.0), captured(x)
            with torch.no_grad():
                torch._foreach_mul([x], 2.0)

    on_two_ranks(program)
    assert len(caches()) >= 7
    assert sum(map(bool, caches().values())) >= 5
    assert captured.programs
    register_rule(torch.hypot, registry.rule_of(torch.hypot))
    assert {name for name, cache in caches().items() if cache} == set()
    assert not captured.programs


def test_a_rule_that_is_taught_late_is_asked_by_lists_and_by_captured_functions():
    captured = vd.capture(lambda x: x.mul(3.0))

    def program(x):
        with torch.no_grad():
            for _ in range(3):
                torch._foreach_mul([x, x], 2.0), captured(x)

    on_two_ranks(program)
    asked = Asked(registry.rule_of(torch.Tensor.mul))
    register_rule(torch.Tensor.mul, asked.rule)
    on_two_ranks(lambda x: torch._foreach_mul([x, x], 2.0))
    assert asked.count
    count = asked.count
    on_two_ranks(captured)
    assert asked.count > count
