"""A rule taught to a custom operator serves its backward and each of its names, in every layout."""

import pytest
import taught_rules
import torch
from on_mesh import on_mesh
from vescale_dtensor import Partial, Replicate, Shard, distribute_tensor
from vescale_dtensor.rules import check_rule, register_rule


def test_a_custom_operator_and_its_backward_are_right_in_every_layout():
    register_rule(taught_rules.gate, taught_rules.letters(**taught_rules.GATE))
    register_rule(
        taught_rules.gate_backward,
        taught_rules.letters(**taught_rules.GATE_BACKWARD, reduce={"r": "sum"}),
    )
    report = check_rule(taught_rules.gate, [(taught_rules.ROWS, taught_rules.COLUMNS)], most=12)
    assert report.fallbacks == 0
    assert report.sharded > 20
    g = torch.linspace(-1, 1, 20).reshape(5, 4)
    report = check_rule(
        taught_rules.gate_backward,
        [(g, taught_rules.ROWS, taught_rules.COLUMNS)],
        gradients=False,
        most=8,
    )
    assert report.sharded > 14
    assert "(2, 2)" in str(report)


@pytest.mark.parametrize("given", ["definition", "packet", "overload"])
def test_each_name_of_a_custom_operator_reaches_its_rule(given):
    names = {
        "definition": taught_rules.gate,
        "packet": torch.ops.vescale_dtensor_tests.gate,
        "overload": torch.ops.vescale_dtensor_tests.gate.default,
    }
    asked = taught_rules.Asked(taught_rules.letters(**taught_rules.GATE))
    register_rule(names[given], asked.rule)

    def program(x):
        w = taught_rules.COLUMNS.clone().requires_grad_()
        return [f(x.detach().requires_grad_(), w).placements for f in names.values()]

    assert taught_rules.on_two_ranks(program) == [[(Shard(0),)] * 3] * 2
    assert asked.count >= 2  # the overload and the packet are two functions


def test_gradients_of_a_custom_operator_that_is_sharded_along_both_dims():
    register_rule(taught_rules.gate, taught_rules.letters(**taught_rules.GATE))

    def program(mesh):
        x = distribute_tensor(taught_rules.ROWS, mesh, [Shard(0), Shard(1)], src_data_rank=None)
        w = distribute_tensor(
            taught_rules.COLUMNS, mesh, [Replicate(), Shard(0)], src_data_rank=None
        )
        taught_rules.gate(x.requires_grad_(), w.requires_grad_()).sum().backward()
        return x.grad.placements, w.grad.placements, x.grad.full_tensor(), w.grad.full_tensor()

    x, w = taught_rules.ROWS.clone().requires_grad_(), taught_rules.COLUMNS.clone().requires_grad_()
    taught_rules.gate(x, w).sum().backward()
    for of_x, of_w, x_grad, w_grad in on_mesh((2, 2), program):
        assert of_x == (Shard(0), Shard(1))
        assert of_w == (Partial(), Shard(0))
        torch.testing.assert_close(x_grad, x.grad)
        torch.testing.assert_close(w_grad, w.grad)
