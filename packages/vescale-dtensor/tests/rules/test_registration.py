"""What is no rule is refused, and a rule that is registered is the one that is asked.

The page on adding an operator runs as it stands and prints what it says.
Nothing that followed from the rules before a registration is used after it.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import vescale_dtensor as vd
from taught_rules import COLUMNS, ELEMENTS, GATE, ROWS, Asked, fill, gate, letters, on_two_ranks
from vescale_dtensor import Replicate, Shard, rules
from vescale_dtensor._dispatch import registry
from vescale_dtensor._ops import families
from vescale_dtensor._ops.common.functions import functions
from vescale_dtensor._torch.bounded_cache import BoundedCache
from vescale_dtensor.rules import register_rule

REFUSED = {
    "a name": ("aten::mul", letters(**ELEMENTS), "a name is no function"),
    "the wrong way round": (letters(**ELEMENTS), torch.mul, "got the rule first"),
    "a signature": (torch.mul, rules.Signature(**ELEMENTS), "a Signature: make it Rule"),
    "a strategy": (torch.mul, rules.Signature(**ELEMENTS).strategy(), "a Strategy: make it Rule"),
    "a function for a rule": (torch.mul, len, r"found len: make it Rule\('name', len\)"),
    "nothing": (torch.mul, None, "expected a Rule, found None"),
    "a number": (42, letters(**ELEMENTS), "expected a function, found 42"),
    "a module": (torch.nn.Linear, letters(**ELEMENTS), "not classes or modules"),
    "a method of a tensor": (ROWS.mul, letters(**ELEMENTS), r"register torch\.Tensor\.mul"),
    "a lambda": (lambda x: x, letters(**ELEMENTS), "of which torch knows nothing"),
    "metadata": (torch.Tensor.size, letters(**ELEMENTS), "no operation on data"),
    "a strategy that is none": (torch.mul, rules.Rule("r", 3), "strategy is 3"),
    "reads that are none": (torch.mul, rules.Rule("r", len, reads=64), "reads is 64"),
    "writes by name": (torch.mul, rules.Rule("r", len, writes="x"), "writes is 'x'"),
    "an untold write": (torch.ops.aten.add_.Tensor, rules.Rule("r", len), "writes to self"),
    "a write that returns nothing": (fill, rules.Rule("r", len, writes=0), "returns none of them"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_rule_or_no_function_is_refused(name):
    func, rule, words = REFUSED[name]
    before = registry.known_rules(), registry.known_handlers()
    with pytest.raises(rules.RuleError, match=words):
        rules.register_rule(func, rule)
    assert (registry.known_rules(), registry.known_handlers()) == before


def overridable_in_python(x):
    if torch.overrides.has_torch_function_unary(x):
        return torch.overrides.handle_torch_function(overridable_in_python, (x,), x)
    return torch.sigmoid(x)


def test_python_functions_that_ask_for_overrides_have_rules():
    asked = Asked(letters(**ELEMENTS))
    rules.register_rule(overridable_in_python, asked.rule)
    rules.check_rule(overridable_in_python, [ROWS], most=4)
    assert asked.count


def test_replace_is_a_choice():
    with pytest.raises(rules.RuleError, match="something answers for it already"):
        rules.register_rule(torch.mul, letters(**ELEMENTS), replace=False)
    rules.register_rule(gate, letters(**GATE), replace=False)
    with pytest.raises(rules.RuleError, match="already"):
        rules.register_rule(gate, letters(**GATE), replace=False)


def test_a_rule_takes_the_place_of_a_handler_that_would_not_ask_it():
    assert torch.block_diag in registry.handlers
    asked = Asked(rules.Rule("taught", lambda call: None))
    rules.register_rule(torch.block_diag, asked.rule)
    on_two_ranks(lambda x: torch.block_diag(x, x))
    assert asked.count


def test_every_handler_that_stands_beside_a_rule_asks_for_it():
    """Each is called in a form that is no special case of its handler."""
    calls = {
        torch.conj: lambda x: torch.conj(x.to(torch.complex64)),
        torch.Tensor.to: lambda x: x.to(torch.float64),
        torch.Tensor.double: lambda x: x.double(),
        torch.Tensor.bool: lambda x: x.bool(),
        torch.diagonal: torch.diagonal,
        F.l1_loss: lambda x: F.l1_loss(x, x * 2),
        torch.index_put: lambda x: torch.index_put(x, (torch.tensor([0]),), torch.ones(())),
        torch.Tensor.__setitem__: lambda x: x.clone().__setitem__(torch.tensor([0]), 1.0),
    }
    both = {f for f in registry.handlers if f in registry.known_rules()}
    implemented = {registry.handlers[f].__qualname__ for f in both}
    assert {registry.handlers[f].__qualname__ for f in calls} == implemented
    for func, call in calls.items():
        asked = Asked(registry.rule_of(func))
        rules.register_rule(func, asked.rule)
        on_two_ranks(call)
        assert asked.count, func


def test_no_function_has_two_rules():
    for module in families._MODULES:
        both = [getattr(module, "RULES", {}), getattr(module, "HANDLERS", {})]
        if any(both):
            with pytest.raises(rules.RuleError, match="has two rules or two handlers"):
                registry.install(*both)
    everything = [f for m in families._MODULES for f in getattr(m, "RULES", {})]
    assert len(everything) == len(set(everything)) == len(registry.known_rules())


STRATEGIES = {
    "a signature": (
        lambda call: rules.Signature(**GATE),
        r"a Signature: return its \.strategy\(\)",
    ),
    "letters of one operand": (
        lambda call: rules.Signature(**ELEMENTS).strategy(),
        "for 1 operands, but the call has 2",
    ),
    "candidates of other lengths": (
        lambda call: rules.Strategy((rules.AxisStrategy((Replicate(),) * 3, (Replicate(),)),)),
        "for 3 operands, but the call has 2",
    ),
    "no replicated candidate": (
        lambda call: rules.Strategy((rules.AxisStrategy((Shard(0), Replicate()), (Shard(0),)),)),
        "the first candidate has to be replicated",
    ),
    "a number": (lambda call: 3, "expected a Strategy or None, found 3"),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_that_does_not_fit_the_call_says_so(name):
    strategy, words = STRATEGIES[name]
    rules.register_rule(gate, rules.Rule("taught", strategy))
    with pytest.raises(Exception, match=words) as caught:
        on_two_ranks(lambda x: gate(x, COLUMNS))
    assert isinstance(caught.value.__cause__, rules.RuleError)


def test_a_name_that_means_something_else_in_another_module_has_no_rule_by_it(monkeypatch):
    """As `torch.linalg.polar`, a decomposition since torch 2.14, beside `torch.polar`."""

    def relu(A):
        raise AssertionError("only looked up")

    monkeypatch.setattr(torch.linalg, "relu", relu, raising=False)
    assert torch.relu in functions("relu")
    assert relu not in functions("relu")
    assert torch.linalg.det in functions("det")
    assert torch.fft.fft in functions("fft", (torch, torch.fft))


PAGE = (Path(__file__).parents[2] / "docs" / "adding-an-operator.md").read_text()


def blocks(kind):
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_page_runs_and_prints_what_it_says(tmp_path):
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks("python")))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    assert done.stderr == ""
    assert done.stdout == "".join(blocks("text"))


def test_every_name_that_the_page_imports_from_rules_is_public():
    from vescale_dtensor import rules

    found = re.findall(r"^from vescale_dtensor\.rules import (.*)$", PAGE, flags=re.MULTILINE)
    names = [name.strip() for line in found for name in line.split(",")]
    assert names
    assert set(names) <= set(rules.__all__)


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
