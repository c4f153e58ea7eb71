"""What dispatch does is counted: plans made, wrappers built, calls that take the slow path."""

from collections import defaultdict
from random import Random

import pytest
import torch
import torch.nn.functional as F
import vescale_dtensor as vd
from torch import nn
from vescale_comm import simulate
from vescale_comm.testing import device_mesh, run
from vescale_dtensor import Replicate, Shard
from vescale_dtensor._dispatch import dispatch as _dispatch
from vescale_dtensor._dispatch import plan_cache as _plan_cache
from vescale_dtensor._dispatch import registry as _registry
from vescale_dtensor._fast_path import cache as _cache
from vescale_dtensor._fast_path import compile as _compile
from vescale_dtensor._fast_path import compile_general as _general
from vescale_dtensor._fast_path import forms as _forms
from vescale_dtensor._ops.optim import foreach as _foreach
from vescale_dtensor._ops.optim import fused as _fused
from vescale_dtensor._planning import op_call as _call
from vescale_dtensor._planning import plan as _plan
from vescale_dtensor._tensor import dtensor as _tensor

WIDE = 8


class Counted:
    """How often a function is called; it does what it did."""

    def __init__(self, monkeypatch, module, name):
        self.calls = 0
        self._original = getattr(module, name)
        monkeypatch.setattr(module, name, self)

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self._original(*args, **kwargs)


def block(x, weights):
    rows, length, _ = x.shape
    h = F.layer_norm(x, (WIDE,))
    h = F.silu(F.linear(h, weights[0])) * F.linear(h, weights[1])
    heads = h.view(rows, length, -1, WIDE // 2).transpose(1, 2)
    h = torch.softmax(heads, -1).transpose(1, 2).reshape(rows, length, -1)
    x = x + F.linear(F.dropout(h, 0.1), weights[2])
    return torch.softmax(x, -1).mean() + x.flatten(0, 1).sum() + x.view(-1, WIDE).sum()


def distributed(mesh, tensor, *placements):
    return vd.distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def lengths(rank, world):
    """Plans made for the first eight lengths, and for all others."""
    mesh = device_mesh((2, 2), ("dp", "tp"))
    whole = Replicate()
    weights = [
        distributed(mesh, torch.rand(2 * WIDE, WIDE), whole, Shard(0)).requires_grad_(),
        distributed(mesh, torch.rand(2 * WIDE, WIDE), whole, Shard(0)).requires_grad_(),
        distributed(mesh, torch.rand(WIDE, 2 * WIDE), whole, Shard(1)).requires_grad_(),
    ]
    patch = pytest.MonkeyPatch()
    builds = Counted(patch, _plan_cache, "build")
    early = 0
    try:
        for length in range(1, 61):
            x = distributed(mesh, torch.ones(4, length, WIDE), Shard(0), whole)
            block(x, weights).backward()
            if length == 8:
                early = builds.calls
    finally:
        patch.undo()
    return early, builds.calls - early, _cache.compiled_call_count() < 50_000


def test_dozens_of_sequence_lengths_make_a_handful_of_plans():
    for early, later, bounded in run(lengths, 4, timeout=200):
        assert early > 5
        assert later <= 5
        assert bounded


def reshapes(rank, world):
    """For each thing that reshapes have in common: their plans, as made for each."""
    mesh, random = device_mesh((2, 2), ("dp", "tp")), Random(0)
    func, found, shared = torch.Tensor.reshape, defaultdict(set), 0
    rule = _registry.rule_of(func)
    for _ in range(600):
        shape = [random.choice((1, 2, 2, 3, 4, 6)) for _ in range(random.randint(1, 4))]
        cuts = [random.choice((Replicate(), *map(Shard, range(len(shape))))) for _ in "ab"]
        operand = distributed(mesh, torch.ones(shape), *cuts)
        if len(shape) > 1 and random.random() < 0.5:
            operand = operand.transpose(0, -1)
        target = regrouped_at_random(operand.shape, random)
        call = _call.OpCall(func, (operand, target), {}, rule.reads)
        alike, plan = rule.shape_class(call), _plan.build(call, rule)
        if alike is not None and not plan.redistributes:
            assert plan.with_shape(alike[1]).strategy.shapes == plan.strategy.shapes == (target,)
            shared += alike[0] in found
            found[alike[0]].add((plan.uses, plan.outputs))
    return shared, max(len(plans) for plans in found.values())


def regrouped_at_random(shape, random):
    """Another shape of as many elements: neighbours are joined, dims are split and ones put in."""
    target = [*shape]
    for _ in range(random.randint(0, 3)):
        at = random.randrange(len(target))
        if random.random() < 0.4 and at + 1 < len(target):
            target[at : at + 2] = [target[at] * target[at + 1]]
        else:
            factor = random.choice([f for f in range(1, target[at] + 1) if target[at] % f == 0])
            target[at : at + 1] = [factor, target[at] // factor]
    return tuple(target)


def test_reshapes_that_share_a_plan_would_each_have_made_it():
    for shared, kinds in simulate(4).run(reshapes):
        assert shared > 100
        assert kinds == 1


def slow_path_counts(patch):
    """Counters of what every call on the slow path does: dispatch, and analysis of its operands."""
    modules = (_compile, _forms, _general)
    called = [Counted(patch, module, "dispatch") for module in modules]
    return [*called, *(Counted(patch, module, "OpCall") for module in (_compile, _dispatch))]


def known_functions(mesh):
    """Each name -> a call of a common function."""
    x, y = (distributed(mesh, torch.ones(4, WIDE), Shard(0)) for _ in "xy")
    weight = distributed(mesh, torch.ones(WIDE, WIDE), Replicate()).requires_grad_()
    columns = distributed(mesh, torch.ones(4, WIDE), Shard(1))
    scale = distributed(mesh, torch.ones(WIDE), Replicate()).requires_grad_()
    return {
        "add": lambda: x + y,
        "mul": lambda: x * 2.0,
        "mm": lambda: torch.mm(x, weight),
        "view": lambda: x.view(-1, 2, 4),
        "slice": lambda: weight[2:4],
        "softmax": lambda: torch.softmax(x, -1),
        "norm": lambda: F.layer_norm(x, (WIDE,)),
        "moved norm, by name": lambda: F.rms_norm(columns, (WIDE,), weight=scale),
        "stack": lambda: torch.stack([x, y], 1),
        "split": lambda: x.split(4, 1),
        "in place": lambda: y.mul_(1.0),
        "drop": lambda: F.dropout(x, 0.5),
    }


def second_calls(rank, world):
    """For each function, how often its first and its second call do what the slow path does."""
    cases = known_functions(device_mesh((world,), ("tp",)))
    vd.register_rule(torch.hypot, _registry.rule_of(torch.hypot))  # empties every cache
    found = {}
    for name, call in cases.items():
        patch = pytest.MonkeyPatch()
        slow_path = slow_path_counts(patch)
        try:
            call()
            first = sum(c.calls for c in slow_path)
            call()
        finally:
            patch.undo()
        found[name] = first, sum(c.calls for c in slow_path) - first
    return found


def test_the_second_call_of_a_function_is_on_the_fast_path():
    for found in run(second_calls, 2):
        # Dropout of no partial operand needs no plan at all.
        assert [name for name, (first, _) in found.items() if not first] == ["drop"]
        assert {name: second for name, (_, second) in found.items() if second} == {}


def constructions(rank, world):
    found = {}
    for name, call in known_functions(device_mesh((world,), ("tp",))).items():
        for _ in range(3):
            call()
        patch = pytest.MonkeyPatch()
        built = [Counted(patch, module, "new_wrapper") for module in (_tensor, _forms)]
        slow_path = slow_path_counts(patch)
        try:
            call()
        finally:
            patch.undo()
        found[name] = sum(c.calls for c in built), sum(c.calls for c in slow_path)
    return found


def test_a_known_call_builds_a_wrapper_for_each_result_and_nothing_else():
    for found in run(constructions, 2):
        # What is redistributed has a wrapper, too.
        others = {"split": (2, 0), "in place": (0, 0), "moved norm, by name": (2, 0)}
        expected = dict.fromkeys(found, (1, 0)) | others
        assert found == expected


def optimizer_wrappers(rank, world):
    mesh = device_mesh((world,), ("tp",))
    parameters = [nn.Parameter(distributed(mesh, torch.ones(4, WIDE), Shard(0))) for _ in range(10)]
    for parameter in parameters:
        parameter.grad = distributed(mesh, torch.ones(4, WIDE), Shard(0))
    found = {}
    for form in ("foreach", "fused"):
        optimizer = torch.optim.AdamW(parameters, **{form: True})
        for _ in range(3):
            optimizer.step()
        patch = pytest.MonkeyPatch()
        built = [Counted(patch, module, "new_wrapper") for module in (_tensor, _forms)]
        try:
            optimizer.step()
        finally:
            patch.undo()
        found[form] = sum(c.calls for c in built)
    return found


def test_an_optimizer_step_wraps_only_what_it_makes():
    # foreach: one square root for each parameter. fused: nothing.
    assert run(optimizer_wrappers, 2) == [{"foreach": 10, "fused": 0}] * 2


def steps_on_sums(rank, world):
    """How often steps do what the slow path does, whose gradients are partial sums each time."""
    mesh = device_mesh((world,), ("dp",))
    x = distributed(mesh, torch.ones(4, WIDE), Shard(0))
    found = {}
    for form in ("foreach", "fused"):
        weights = [
            nn.Parameter(distributed(mesh, torch.ones(WIDE, WIDE), Replicate())) for _ in range(3)
        ]
        optimizer = torch.optim.AdamW(weights, **{form: True})
        for _ in range(3):
            optimizer.zero_grad()
            sum((x @ weight).square().sum() for weight in weights).backward()
            assert weights[0].grad.placements[0].is_partial()
            patch = pytest.MonkeyPatch()
            slow_path = slow_path_counts(patch)
            plans = Counted(patch, _foreach, "plan_for")
            steps = Counted(patch, _fused, "_step")
            try:
                optimizer.step()
            finally:
                patch.undo()
            counted = [c.calls for c in (*slow_path, plans, steps)]
            found.setdefault(form, []).append(sum(counted))
            assert not weights[0].grad.placements[0].is_partial()
    return found


def test_steps_on_partial_gradients_are_known_from_the_second_on():
    for found in run(steps_on_sums, 2):
        for form, (first, _, *later) in found.items():
            assert first > 0, form
            assert later == [0], form
