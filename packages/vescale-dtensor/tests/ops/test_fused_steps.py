"""A fused step changes the tensors that it was given, in whatever layouts these are.

A kernel of local tensors has every list in its parameter's layout. What was redistributed for it is
written back; what cannot be written is refused, as are lists of different lengths.
"""

import pytest
import torch
import vescale_dtensor as vd
from on_mesh import on_mesh
from vescale_comm import simulate
from vescale_dtensor import Replicate, Shard, distribute_tensor

LAYOUTS = {
    "R": [Replicate(), Replicate()],
    "S": [Shard(0), Replicate()],
    "SS": [Shard(0), Shard(0)],
    "C": [Replicate(), Shard(1)],
    "P": [vd.Partial(), Replicate()],
    "plain": None,
}
# Layouts of parameters, gradients, first and second moments. Shards of five rows are uneven, and
# those of one row are empty on some ranks.
TABLE = ["S S SS S", "R S S P", "S plain C R", "C P SS S", "plain S R R", "S R S plain", "R R P R"]
HOW = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.01, "eps": 1e-8, "maximize": False}


def given(shape, names, mesh):
    """The lists of a step of Adam with two parameters; `mesh` is None for one device."""
    draw = torch.Generator().manual_seed(5)

    def placed(name):
        tensor = torch.rand(shape, generator=draw) + 0.5
        at = LAYOUTS[name]
        return tensor if mesh is None or at is None else distribute_tensor(tensor, mesh, at)

    first, *rest = names.split()
    lists = [[placed(name), placed(first)] for name in (first, *rest, rest[-1])]
    return [*lists, [torch.ones(()), torch.ones(())]]


def stepped(shape, names, mesh, scale):
    lists = given(shape, names, mesh)
    unscaled = {} if scale is None else {"grad_scale": torch.tensor(scale)}
    unscaled |= {} if scale is None else {"found_inf": torch.zeros(())}
    with torch.no_grad():
        for rate in (0.1, 0.2):
            torch._fused_adam_(*lists, lr=rate, amsgrad=True, **HOW, **unscaled)
    return [[t.full_tensor() if isinstance(t, vd.DTensor) else t for t in each] for each in lists]


@pytest.mark.parametrize("scale", [None, 2.0])
@pytest.mark.parametrize("names", TABLE)
def test_a_step_updates_what_it_was_given(names, scale):
    def run(mesh):
        for shape in ((5, 3), (1, 2)):
            expected = stepped(shape, names, None, scale)
            found = stepped(shape, names, mesh, scale)
            torch.testing.assert_close(found, expected)

    on_mesh((2, 2), run)


def test_a_state_that_is_a_copied_view_is_refused():
    def run(mesh):
        base = distribute_tensor(torch.ones(3, 2), mesh, LAYOUTS["SS"])
        view = base.view(-1)
        lists = [[distribute_tensor(torch.ones(6), mesh, view.placements)] for _ in range(4)]
        steps = [torch.ones(())]
        with torch.no_grad():
            torch._fused_adam_(*lists, [], steps, lr=0.1, amsgrad=False, **HOW)  # is stored
            lists[2] = [view]
            with pytest.raises(vd.UnsupportedError, match="copy"):
                torch._fused_adam_(*lists, [], steps, lr=0.1, amsgrad=False, **HOW)

    on_mesh((2, 2), run)


@pytest.mark.parametrize("short", [1, 2, 5])
def test_lists_of_different_lengths_are_torchs_error(short):
    def run(rank, world_size):
        lists = given((5, 3), "R R R R", vd.init_device_mesh("cpu", (2, 2)))
        lists[short] = lists[short][:1]
        with torch.no_grad(), pytest.raises(RuntimeError, match="n_tensors"):
            torch._fused_adam_(*lists, lr=0.1, amsgrad=True, **HOW)

    plain = given((5, 3), "R R R R", None)
    plain[short] = plain[short][:1]
    with torch.no_grad(), pytest.raises(RuntimeError, match="n_tensors"):
        torch._fused_adam_(*plain, lr=0.1, amsgrad=True, **HOW)
    simulate(4)(run)
