"""Rules that users write: what is refused, who is asked, what `check_rule` finds.

Everything runs on simulated ranks, in this process, and what it teaches is forgotten after each
test.
"""

import pytest
import torch
import torch.nn.functional as F
import vescale_dtensor as vd
from torch import Tensor
from torch.distributed import tensor as torch_dtensor
from vescale_comm import simulate
from vescale_dtensor import Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from vescale_dtensor._dispatch import registry
from vescale_dtensor._ops import families
from vescale_dtensor._torch.bounded_cache import BoundedCache
from vescale_dtensor.rules import (
    AxisStrategy,
    Reads,
    Rule,
    RuleCheckError,
    RuleError,
    Sample,
    Signature,
    Strategy,
    check_rule,
    local_offsets,
    register_rule,
    register_sharding,
)

ROWS, COLUMNS = torch.linspace(-2, 2, 20).reshape(5, 4), torch.linspace(1, 2, 4)


@torch.library.custom_op("vescale_dtensor_tests::gate", mutates_args=())
def gate(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.sigmoid(x) * w


@torch.library.custom_op("vescale_dtensor_tests::gate_backward", mutates_args=())
def gate_backward(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    s = torch.sigmoid(x)
    return g * w * s * (1 + x * (1 - s)), (g * x * s).sum(0)


@gate.register_fake
def _(x, w):
    return torch.empty_like(x)


@gate_backward.register_fake
def _(g, x, w):
    return torch.empty_like(x), torch.empty_like(w)


gate.register_autograd(
    lambda ctx, g: gate_backward(g, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@torch.library.custom_op("vescale_dtensor_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    """Each row two times, one below the other."""
    return x.repeat_interleave(2, 0)


@twice.register_fake
def _(x):
    return x.new_empty(2 * x.shape[0], *x.shape[1:])


@torch.library.custom_op("vescale_dtensor_tests::unfaked", mutates_args=())
def unfaked(x: Tensor) -> Tensor:
    return x.clone()


@torch.library.custom_op("vescale_dtensor_tests::fill", mutates_args=("x",))
def fill(x: Tensor) -> None:
    x.fill_(1)


GATE = {"inputs": (("r", "c"), ("c",)), "outputs": (("r", "c"),)}
GATE_BACKWARD = {"inputs": (("r", "c"), ("r", "c"), ("c",)), "outputs": (("r", "c"), ("c",))}


def letters(name="taught", **options):
    signature = Signature(**options)
    return Rule(name, lambda call: signature.strategy(), reads=Reads.NOTHING)


@pytest.fixture(autouse=True)
def _forget_what_was_taught():
    tables = (registry._rules, registry.handlers)
    sets = (registry.constants, registry.scalar_agnostic)
    before = [dict(table) for table in tables], [set(each) for each in sets]
    yield
    for table, was in zip((*tables, *sets), (*before[0], *before[1]), strict=True):
        table.clear()
        table.update(was)
    registry.on_change.notify()


class Asked:
    """A rule that counts how often it is asked, and says what another one says."""

    def __init__(self, rule):
        self.count = 0
        self.rule = Rule(rule.name, self._strategy, rule.reads, rule.writes)
        self._original = rule

    def _strategy(self, call):
        self.count += 1
        return self._original.strategy(call)


def on_two_ranks(program):
    def run(rank, world):
        mesh = init_device_mesh("cpu", (world,))
        return program(distribute_tensor(ROWS, mesh, [Shard(0)], src_data_rank=None))

    return simulate(2).run(run)


# --- Custom operators


def test_a_custom_operator_and_its_backward_are_right_in_every_layout():
    register_rule(gate, letters(**GATE))
    register_rule(gate_backward, letters(**GATE_BACKWARD, reduce={"r": "sum"}))
    report = check_rule(gate, [(ROWS, COLUMNS)], most=12)
    assert report.fallbacks == 0
    assert report.sharded > 20
    g = torch.linspace(-1, 1, 20).reshape(5, 4)
    report = check_rule(gate_backward, [(g, ROWS, COLUMNS)], gradients=False, most=8)
    assert report.sharded > 14
    assert "(2, 2)" in str(report)


@pytest.mark.parametrize("given", ["definition", "packet", "overload"])
def test_each_name_of_a_custom_operator_reaches_its_rule(given):
    names = {
        "definition": gate,
        "packet": torch.ops.vescale_dtensor_tests.gate,
        "overload": torch.ops.vescale_dtensor_tests.gate.default,
    }
    asked = Asked(letters(**GATE))
    register_rule(names[given], asked.rule)

    def program(x):
        w = COLUMNS.clone().requires_grad_()
        return [f(x.detach().requires_grad_(), w).placements for f in names.values()]

    assert on_two_ranks(program) == [[(Shard(0),)] * 3] * 2
    assert asked.count >= 2  # the overload and the packet are two functions


def test_gradients_of_a_custom_operator_that_is_sharded_along_both_dims():
    register_rule(gate, letters(**GATE))

    def program(rank, world):
        mesh = init_device_mesh("cpu", (2, 2))
        x = distribute_tensor(ROWS, mesh, [Shard(0), Shard(1)], src_data_rank=None)
        w = distribute_tensor(COLUMNS, mesh, [Replicate(), Shard(0)], src_data_rank=None)
        gate(x.requires_grad_(), w.requires_grad_()).sum().backward()
        return x.grad.placements, w.grad.placements, x.grad.full_tensor(), w.grad.full_tensor()

    x, w = ROWS.clone().requires_grad_(), COLUMNS.clone().requires_grad_()
    gate(x, w).sum().backward()
    for of_x, of_w, x_grad, w_grad in simulate(4).run(program):
        assert of_x == (Shard(0), Shard(1))
        assert of_w == (Partial(), Shard(0))
        torch.testing.assert_close(x_grad, x.grad)
        torch.testing.assert_close(w_grad, w.grad)


# --- What `check_rule` finds


class Detached(torch.autograd.Function):
    """The right numbers, and half of their gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g / 2


def half_gradient(context, args, kwargs):
    return torch.sigmoid(Detached.apply(args[0]))


def ignores_its_place(context, args, kwargs):
    return torch.cumsum(*args, **kwargs)


ELEMENTS = {"inputs": (("r", "c"),), "outputs": (("r", "c"),)}
WRONG = {
    "linear, though it is not": (torch.sigmoid, (ROWS,), {**ELEMENTS, "linear": ((0,),)}, "output"),
    "half the gradient": (torch.sigmoid, (ROWS,), {**ELEMENTS, "local": half_gradient}, "gradient"),
    "starts anew on each rank": (
        torch.cumsum,
        (ROWS, 0),
        {**ELEMENTS, "local": ignores_its_place},
        "output 0",
    ),
    "dims of the output in another order": (
        torch.sigmoid,
        (ROWS,),
        {"inputs": (("r", "c"),), "outputs": (("c", "r"),)},
        "output 0: global shape",
    ),
    "another reduction": (
        torch.logsumexp,
        (ROWS, 0),
        {"inputs": (("r", "c"),), "outputs": (("c",),), "reduce": {"r": "sum"}},
        "output 0",
    ),
    "a local shape that is none": (
        torch.sigmoid,
        (ROWS,),
        {**ELEMENTS, "local": lambda context, args, kwargs: torch.sigmoid(args[0])[:1]},
        "the local tensor is",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_found(name):
    func, args, options, words = WRONG[name]
    register_rule(func, letters(**options))
    with pytest.raises(RuleCheckError, match=words) as caught:
        check_rule(func, [args], most=20)
    text = str(caught.value)
    assert "mesh (4,)" in text
    assert "Again: check_rule(..., meshes=[(4,)], placements=[[[" in text
    # What it says can be run again, and fails again.
    placements = eval(text.rpartition("placements=")[2][:-1], vars(vd))
    with pytest.raises(RuleCheckError, match=words):
        check_rule(func, [args], meshes=[(4,)], placements=placements)


def test_a_kernel_that_fails_on_one_rank_is_reported_and_hangs_nobody():
    def local(context, args, kwargs):
        if context.output_layout().coordinate[0] == 1:
            raise ValueError("not here")
        return torch.sigmoid(*args)

    register_rule(torch.sigmoid, letters(**ELEMENTS, local=local))
    with pytest.raises(RuleCheckError, match="raised ValueError: not here"):
        check_rule(torch.sigmoid, [ROWS], most=20)


def test_a_rule_that_is_never_asked_is_no_success():
    with pytest.raises(RuleCheckError, match=r"vescale_dtensor_tests\.gate has no rule"):
        check_rule(gate, [(ROWS, COLUMNS)])
    register_rule(gate, Rule("none", lambda call: None))
    with pytest.raises(RuleCheckError, match="no rule answered"):
        check_rule(gate, [(ROWS, COLUMNS)], most=4)


def test_functions_of_ours_pass_by_their_own_rules():
    report = check_rule(torch.Tensor.add_, [(ROWS, COLUMNS)], most=6)
    assert report.sharded
    report = check_rule(torch.topk, [Sample((ROWS,), {"k": 2, "dim": 1})], most=6)
    assert report.sharded
    # A function of others: whatever answers for those counts.
    report = check_rule(lambda x, w: F.linear(x, w).relu(), [(ROWS, ROWS[:3])], most=6)
    assert report.sharded


def test_layouts_are_uneven_and_empty_and_every_placement_occurs():
    register_rule(gate, letters(**GATE))
    report = check_rule(gate, [(ROWS, COLUMNS)], gradients=False, most=12)
    for axis in (0, 1):
        seen = {
            repr(outcome.trial.placements[0][axis])
            for outcome in report.outcomes
            if outcome.trial.mesh == (2, 2)
        }
        assert seen >= {
            "Replicate()",
            "Shard(0)",
            "Shard(1)",
            "RaggedShard((0,), (0, 1))",
            "RaggedShard((1,), (0, 1))",
            "Partial(sum)",
            "Partial(avg)",
        }


# --- Registration


REFUSED = {
    "a name": ("aten::mul", letters(**ELEMENTS), "a name is no function"),
    "the wrong way round": (letters(**ELEMENTS), torch.mul, "got the rule first"),
    "a signature": (torch.mul, Signature(**ELEMENTS), "a Signature: make it Rule"),
    "a strategy": (torch.mul, Signature(**ELEMENTS).strategy(), "a Strategy: make it Rule"),
    "a function for a rule": (torch.mul, len, r"found len: make it Rule\('name', len\)"),
    "nothing": (torch.mul, None, "expected a Rule, found None"),
    "a number": (42, letters(**ELEMENTS), "expected a function, found 42"),
    "a module": (torch.nn.Linear, letters(**ELEMENTS), "not classes or modules"),
    "a method of a tensor": (ROWS.mul, letters(**ELEMENTS), r"register torch\.Tensor\.mul"),
    "a lambda": (lambda x: x, letters(**ELEMENTS), "of which torch knows nothing"),
    "metadata": (torch.Tensor.size, letters(**ELEMENTS), "no operation on data"),
    "a strategy that is none": (torch.mul, Rule("r", 3), "strategy is 3"),
    "reads that are none": (torch.mul, Rule("r", len, reads=64), "reads is 64"),
    "writes by name": (torch.mul, Rule("r", len, writes="x"), "writes is 'x'"),
    "an untold write": (torch.ops.aten.add_.Tensor, Rule("r", len), "writes to self"),
    "a write that returns nothing": (fill, Rule("r", len, writes=0), "returns none of them"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_rule_or_no_function_is_refused(name):
    func, rule, words = REFUSED[name]
    before = registry.known_rules(), registry.known_handlers()
    with pytest.raises(RuleError, match=words):
        register_rule(func, rule)
    assert (registry.known_rules(), registry.known_handlers()) == before


def overridable_in_python(x):
    if torch.overrides.has_torch_function_unary(x):
        return torch.overrides.handle_torch_function(overridable_in_python, (x,), x)
    return torch.sigmoid(x)


def test_python_functions_that_ask_for_overrides_have_rules():
    asked = Asked(letters(**ELEMENTS))
    register_rule(overridable_in_python, asked.rule)
    check_rule(overridable_in_python, [ROWS], most=4)
    assert asked.count


def test_replace_is_a_choice():
    with pytest.raises(RuleError, match="something answers for it already"):
        register_rule(torch.mul, letters(**ELEMENTS), replace=False)
    register_rule(gate, letters(**GATE), replace=False)
    with pytest.raises(RuleError, match="already"):
        register_rule(gate, letters(**GATE), replace=False)


def test_a_rule_takes_the_place_of_a_handler_that_would_not_ask_it():
    assert torch.block_diag in registry.handlers
    asked = Asked(Rule("taught", lambda call: None))
    register_rule(torch.block_diag, asked.rule)
    on_two_ranks(lambda x: torch.block_diag(x, x))
    assert asked.count


def test_every_handler_that_stands_beside_a_rule_asks_for_it():
    """Each is called in a form that is no special case of its handler."""
    calls = {
        torch.conj: lambda x: torch.conj(x.to(torch.complex64)),
        torch.Tensor.to: lambda x: x.to(torch.float64),
        torch.Tensor.double: lambda x: x.double(),
        torch.Tensor.bool: lambda x: x.bool(),
        F.l1_loss: lambda x: F.l1_loss(x, x * 2),
        torch.index_put: lambda x: torch.index_put(x, (torch.tensor([0]),), torch.ones(())),
        torch.Tensor.__setitem__: lambda x: x.clone().__setitem__(torch.tensor([0]), 1.0),
    }
    both = {f for f in registry.handlers if f in registry.known_rules()}
    implemented = {registry.handlers[f].__qualname__ for f in both}
    assert {registry.handlers[f].__qualname__ for f in calls} == implemented
    for func, call in calls.items():
        asked = Asked(registry.rule_of(func))
        register_rule(func, asked.rule)
        on_two_ranks(call)
        assert asked.count, func


def test_no_function_has_two_rules():
    for module in families._MODULES:
        both = [getattr(module, "RULES", {}), getattr(module, "HANDLERS", {})]
        if any(both):
            with pytest.raises(RuleError, match="has two rules or two handlers"):
                registry.install(*both)
    everything = [f for m in families._MODULES for f in getattr(m, "RULES", {})]
    assert len(everything) == len(set(everything)) == len(registry.known_rules())


# --- Caches


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


# --- Rules written for torch's DTensor


def test_rules_that_were_written_for_torch_are_taken():
    @register_sharding([gate_backward])
    def shardings(g, x, w):
        assert g.ndim == 2
        rows = torch_dtensor.Shard(0), torch_dtensor.Replicate(), torch_dtensor.Partial()
        return [
            ([rows[0], rows[2]], [rows[0], rows[0], rows[1]]),
            ([Shard(-1), Shard(0)], [Shard(1), Shard(1), Shard(-1)]),
        ]

    g = torch.linspace(-1, 1, 20).reshape(5, 4)
    report = check_rule(gate_backward, [(g, ROWS, COLUMNS)], gradients=False, most=8)
    assert report.fallbacks == 0
    assert report.sharded > 12


@pytest.mark.parametrize("rows", [5, 8])
def test_shardings_of_dims_with_different_extents_serve_where_shards_correspond(rows):
    @register_sharding(twice)
    def shardings(x):
        return [([Shard(0)], [Shard(0)]), ([Shard(1)], [Shard(1)])]

    x = torch.linspace(0, 1, rows * 4).reshape(rows, 4)
    report = check_rule(twice, [x], gradients=False)
    by_rows = [
        outcome.sharded
        for outcome in report.outcomes
        if all(p == Shard(0) for p in outcome.trial.placements[0])
    ]
    assert by_rows == [rows == 8] * 2


LISTS = {
    "no pairs": ([[Shard(0)]], "expected pairs"),
    "too few": ([([Shard(0)], [Shard(0)])], "has placements for 1 and 1"),
    "no such dim": ([([Shard(5)], [Replicate(), Replicate()])], r"Shard\(dim=5\)|Shard\(5\)"),
    "another placement": ([([vd.InterleavedShard(0, 2)], [Replicate()] * 2)], "is not one of"),
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_of_shardings_that_do_not_fit_are_refused(name):
    listed, words = LISTS[name]
    register_sharding(gate)(lambda x, w: listed)
    with pytest.raises(Exception, match=words) as caught:
        on_two_ranks(lambda x: gate(x, COLUMNS))
    assert isinstance(caught.value.__cause__, RuleError)


def test_an_operator_without_a_fake_says_that_it_needs_one():
    register_sharding(unfaked)(lambda x: [([Shard(0)], [Shard(0)])])
    with pytest.raises(Exception, match="register_fake"):
        on_two_ranks(unfaked)


# --- Strategies that are none


STRATEGIES = {
    "a signature": (lambda call: Signature(**GATE), r"a Signature: return its \.strategy\(\)"),
    "letters of one operand": (
        lambda call: Signature(**ELEMENTS).strategy(),
        "for 1 operands, but the call has 2",
    ),
    "candidates of other lengths": (
        lambda call: Strategy((AxisStrategy((Replicate(),) * 3, (Replicate(),)),)),
        "for 3 operands, but the call has 2",
    ),
    "no replicated candidate": (
        lambda call: Strategy((AxisStrategy((Shard(0), Replicate()), (Shard(0),)),)),
        "the first candidate has to be replicated",
    ),
    "a number": (lambda call: 3, "expected a Strategy or None, found 3"),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_that_does_not_fit_the_call_says_so(name):
    strategy, words = STRATEGIES[name]
    register_rule(gate, Rule("taught", strategy))
    with pytest.raises(Exception, match=words) as caught:
        on_two_ranks(lambda x: gate(x, COLUMNS))
    assert isinstance(caught.value.__cause__, RuleError)


def test_local_offsets_of_every_shard():
    def local(context, args, kwargs):
        first = local_offsets(context)[0]
        return torch.arange(first, first + args[0].shape[0], dtype=torch.float32)

    rule = letters(
        inputs=(("r", "c"),), outputs=(("r",),), local=local,
        unshardable=frozenset({"c"}), contiguous_only=frozenset({"r"}),
    )  # fmt: skip
    places = torch.library.custom_op("vescale_dtensor_tests::places", mutates_args=())(_places)
    register_rule(places, rule)
    assert check_rule(places, [ROWS], gradients=False, most=20).sharded


def _places(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0], dtype=torch.float32)
