"""A rule taught to a custom operator serves its backward and each of its names, in every layout."""

import pytest
import torch
from on_mesh import on_mesh
from taught_rules import (
    COLUMNS,
    GATE,
    GATE_BACKWARD,
    ROWS,
    Asked,
    gate,
    gate_backward,
    letters,
    on_two_ranks,
)
from vescale_dtensor import Partial, Replicate, Shard, distribute_tensor
from vescale_dtensor.rules import check_rule, register_rule


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

    def program(mesh):
        x = distribute_tensor(ROWS, mesh, [Shard(0), Shard(1)], src_data_rank=None)
        w = distribute_tensor(COLUMNS, mesh, [Replicate(), Shard(0)], src_data_rank=None)
        gate(x.requires_grad_(), w.requires_grad_()).sum().backward()
        return x.grad.placements, w.grad.placements, x.grad.full_tensor(), w.grad.full_tensor()

    x, w = ROWS.clone().requires_grad_(), COLUMNS.clone().requires_grad_()
    gate(x, w).sum().backward()
    for of_x, of_w, x_grad, w_grad in on_mesh((2, 2), program):
        assert of_x == (Shard(0), Shard(1))
        assert of_w == (Partial(), Shard(0))
        torch.testing.assert_close(x_grad, x.grad)
        torch.testing.assert_close(w_grad, w.grad)
