"""What guards do not see is noticed: calls 2, 4, 8 ... are compared with the function.

Guards are blinded here, so that whatever changes is state outside of the contract. Every rank
raises, and names what differs: outputs, what was written, which leaves get a gradient, the graph,
and gradients where these are compared. Training is bit for bit that without comparisons; what
cannot run twice is left out, and said.
"""

from types import SimpleNamespace

import pytest
import torch
import vescale_dtensor as vd
from capture_guards import rows, spread
from torch import nn
from vescale_comm import all_reduce, group_of
from vescale_comm.testing import on_ranks
from vescale_dtensor import ReplayCheck, Replicate, Shard

WITH_GRADIENTS = ReplayCheck(gradients=lambda: True)


def blinded(captured):
    """Let the programs of a captured function stand for any call of their key."""
    for program in captured.programs:
        if "stands_for" in vars(program):
            continue
        guards, free = program.stands_for, program.free

        def stands(call, guards=guards, free=free):
            return guards(call) or [one._local_tensor for one in free.wrappers]

        program.stands_for = stands


def parameter(*size):
    torch.manual_seed(0)
    return spread(torch.randn(*size), Replicate()).requires_grad_()


def called(captured, changed, change, until=16, backward=False):
    """Call it until an error comes, `change` before call number `changed`; returns both."""
    for number in range(1, until + 1):
        if number == changed:
            change()
        try:
            out = captured(spread(rows(seed=number)))
            if backward:
                out.sum().backward()
        except vd.CaptureError as error:
            return number, str(error)
        blinded(captured)
    return None, ""


@pytest.mark.parametrize(("changed", "noticed"), [(10, 16), (5, 8), (2, 2), (16, 16)])
@on_ranks(2, simulated=True)
def test_changed_state_is_noticed_in_the_next_sampled_call(changed, noticed):
    box = SimpleNamespace(scale=2.0)

    def scaled(x):
        return x + 1, x * box.scale

    captured = vd.capture(scaled)

    def change():
        box.scale = 3.0

    number, words = called(captured, changed, change)
    assert number == noticed
    assert "output 1, DTensor(f32[5@dp, 4])" in words
    assert "scaled" in words
    assert "make it an argument" in words.lower()


@on_ranks(2, simulated=True)
def test_every_rank_raises_where_one_differs():
    rank = torch.distributed.get_rank()
    box = SimpleNamespace(scale=2.0)

    def change():
        box.scale += rank

    captured = vd.capture(lambda x: x * box.scale)
    number, words = called(captured, 3, change)
    assert number == 4
    assert "the output, DTensor(f32[5@dp, 4])" in words
    assert ("(on rank 1)" in words) is (rank == 0)


@on_ranks(2, simulated=True)
def test_writes_and_draws_are_noticed():
    total, other = torch.zeros(4), torch.zeros(4)
    box = SimpleNamespace(more=0.0, draws=False, writes=False)

    def step(x):
        total.add_(1 + box.more)
        if box.draws:
            torch.rand(3)
        if box.writes:
            other.add_(total)
        return x + total + 0 * other

    for name, value, words in [
        ("more", 1.0, "differs from the function in the output"),
        ("draws", True, "random generators"),
        ("writes", True, "a write to a tensor [4]"),
    ]:
        captured = vd.capture(step)
        number, found = called(
            captured, 3, lambda name=name, value=value: setattr(box, name, value)
        )
        assert number == 4
        assert words in found
        setattr(box, name, type(value)(0))
        other.zero_()


@on_ranks(2, simulated=True)
def test_a_flag_that_detaches_a_branch_is_noticed():
    weight, bias = parameter(4), parameter(4)
    box = SimpleNamespace(frozen=False)

    def step(x):
        scale = weight.detach() if box.frozen else weight
        return x * scale + bias

    for frozen, who in [(True, "the function"), (False, "the replay")]:
        box.frozen = not frozen

        def change(frozen=frozen):
            box.frozen = frozen

        number, words = called(vd.capture(step), 3, change)
        assert number == 4
        assert f"a leaf, f32[4] gets none from {who}" in words, words


@on_ranks(2, simulated=True)
def test_another_graph_with_the_same_values_is_noticed():
    weight = parameter(4)
    box = SimpleNamespace(squared=False)

    def step(x):
        scale = weight.detach() + 1
        return x * (weight * 0 + scale if box.squared else weight - weight.detach() + scale)

    number, words = called(vd.capture(step), 3, lambda: setattr(box, "squared", True))
    assert number == 4
    assert "the autograd graph of the outputs" in words


@on_ranks(2, simulated=True)
def test_what_changes_in_backward_alone_is_noticed():
    weight = parameter(4, 4)
    box = SimpleNamespace(scale=1.0)

    def step(x):
        y = torch.tanh(x @ weight)
        y.register_hook(lambda cotangent, scale=box.scale: cotangent * scale)
        return y + x

    def change():
        box.scale = 2.0

    number, words = called(vd.capture(step, check=WITH_GRADIENTS), 10, change, backward=True)
    assert number == 16
    assert "the gradient of a leaf, f32[4, 4]" in words
    # A captured function of a user's own is compared without a backward.
    box.scale = 1.0
    assert called(vd.capture(step), 10, change, backward=True) == (None, "")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x, shared):
        y = nn.functional.dropout(torch.relu(self.norm(self.up(x))), 0.3)
        return self.down(y) + x * shared, y.square().mean()


@pytest.mark.parametrize("check", [WITH_GRADIENTS, ReplayCheck(every=True, gradients=lambda: True)])
@on_ranks(2, simulated=True)
def test_training_has_the_bits_of_a_run_without_comparisons(check):
    found = []
    for how in (None, check):
        torch.manual_seed(0)
        model = vd.distribute_module(Net(), spread(rows()).device_mesh)
        captured = vd.capture(model, check=how)
        shared = parameter(4)
        optimizer = torch.optim.AdamW([*model.parameters(), shared], lr=0.1)
        made = []
        for seed in range(10):
            x = spread(rows(6, seed=seed)).requires_grad_()
            # An argument that is used inside and outside, with a history of its own.
            inner = x * 2
            y, loss = captured(inner, shared)
            ((y * inner).sum() + loss).backward()
            made += [y.detach().to_local(), x.grad.to_local()]
            if seed % 3:
                optimizer.step()
                optimizer.zero_grad()
        made += [one.detach().to_local() for one in (*model.parameters(), shared)]
        made += [*map(vd_local, model.buffers()), torch.get_rng_state()]
        found.append(made)
    assert all(map(torch.equal, *found))
    assert captured.comparisons == (9 if check.every else 3)
    assert captured.uncompared is None


@on_ranks(2, simulated=True)
def test_an_argument_that_another_one_was_computed_from():
    """As a decoder's block gets the encoder's states, and what the block before made of them."""
    weight = parameter(4)
    blocks = [
        vd.capture(lambda x, states: x + (states * weight).tanh(), check=WITH_GRADIENTS)
        for _ in range(2)
    ]
    for seed in range(5):
        states = spread(rows(seed=seed)).requires_grad_() * 2
        x = states.tanh()
        for block in blocks:
            x = block(x, states)
        x.sum().backward()
    assert [block.comparisons for block in blocks] == [2, 2]


def vd_local(value):
    return value.to_local() if isinstance(value, vd.DTensor) else value


@on_ranks(2, simulated=True)
def test_gradients_stay_the_tensors_that_they_were():
    weight = parameter(4)

    def step(x):
        (x * weight).sum().backward()

    captured, grads = vd.capture(step), []
    for seed in range(5):
        captured(spread(rows(seed=seed)))
        grads.append(weight.grad)
        total = sum(rows(seed=one).sum(0) for one in range(seed + 1))
        torch.testing.assert_close(grads[0].full_tensor(), total)
    assert captured.comparisons == 1  # in the second call it finds gradients, and is recorded
    assert all(one is grads[0] for one in grads)


@on_ranks(2, simulated=True)
def test_what_cannot_run_twice_is_left_uncompared_and_said():
    weight = parameter(4)

    def history(x):
        (x * weight).sum().backward()

    def writes(x):
        x.mul_(weight)
        return x.sum()

    for function, words in [(history, "only once"), (writes, "given twice")]:
        captured = vd.capture(function)
        for seed in range(5):
            captured(spread(rows(seed=seed)) * weight)
        assert captured.replays >= 3
        assert captured.comparisons == 0
        assert words in captured.uncompared
        assert words in captured.programs[0].explain()
        asked, given = vd.capture(function, check="sampled"), spread(rows()) * weight
        asked(spread(rows()) * weight)
        with pytest.raises(vd.CaptureError, match=words):
            asked(given)
    group = group_of(spread(rows()).device_mesh, (0,))
    captured = vd.capture(lambda x: all_reduce(x, group) * 2)
    for seed in range(5):
        captured(rows(seed=seed))
    assert (captured.replays, captured.comparisons) == (4, 0)
    assert "which ranks have to agree" in captured.programs[0].explain()
    for options, words in [
        ({"unguarded": ["scale"]}, "unguarded"),
        ({"transform": lambda module: module}, "transform"),
    ]:
        captured = vd.capture(lambda x: x * 2, **options)
        for seed in range(5):
            captured(spread(rows(seed=seed)))
        assert (captured.replays, captured.comparisons) == (4, 0)
        assert words in captured.uncompared
        assert words in captured.programs[0].explain()


@on_ranks(2, simulated=True)
def test_kernels_without_a_fixed_order_are_no_difference():
    noise = torch.Generator()
    noise.manual_seed(0)

    @torch.library.custom_op(f"sampled::unsteady{torch.distributed.get_rank()}", mutates_args=())
    def unsteady(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand((), generator=noise)

    unsteady.register_fake(torch.empty_like)
    operator = vd.local_map(unsteady, in_placements=None, out_placements=[Shard(0)])
    captured = vd.capture(lambda x: operator(x))
    for seed in range(5):
        captured(spread(rows(seed=seed)))
    assert captured.comparisons == 2
    assert "in no fixed order" in captured.uncompared


def hooked(call, x):
    inner = x * 2
    inner.register_hook(lambda cotangent: cotangent * 3)
    call(inner).sum().backward()


def kept(call, x):
    inner = x * 2
    inner.retain_grad()
    call(inner).sum().backward()
    x.grad = x.grad + inner.grad * 5


def kept_later(call, x):
    inner = x * 2
    out = call(inner).sum()
    inner.retain_grad()
    out.backward()
    x.grad = x.grad + inner.grad * 5


def twice(call, x):
    out = call(x * 2).sum()
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    (out + slope.square().sum()).backward()


@on_ranks(2, simulated=True)
def test_gradients_that_others_look_at_are_those_of_one_run():
    for how in (hooked, kept, kept_later, twice):
        found = []
        for check in (None, ReplayCheck(every=True, gradients=lambda: True)):
            weight, bias = parameter(4, 4), parameter(4)
            total = spread(torch.zeros(4), Replicate())

            def function(x, weight=weight, bias=bias, total=total):
                with torch.no_grad():  # written, and then kept for backward
                    total.lerp_(torch.ones_like(total), 0.1)
                return torch.tanh(x @ weight) * total + bias

            captured, values = vd.capture(function, check=check), []
            for seed in range(4):
                x = spread(rows(seed=seed)).requires_grad_()
                how(captured, x)
                values += [x.grad.to_local(), weight.grad.full_tensor(), total.to_local().clone()]
            found.append(values)
            assert captured.comparisons == (3 if check else 0)
        assert all(map(torch.equal, *found)), how.__name__


@on_ranks(2, simulated=True)
def test_a_view_of_what_is_written_is_not_written_unseen():
    captured = vd.capture(lambda x, _: x.add_(1) * 2)
    for seed in range(4):
        x = rows(seed=seed)
        captured(x, x[0])
        assert torch.equal(x, rows(seed=seed) + 1)
    assert captured.comparisons == 2


def test_units_take_turns():
    calls = {}
    for turn in range(5):
        check, number = ReplayCheck(turn=turn), 1
        while (number := check.next_after(number)) <= 4096:
            calls.setdefault(number, []).append(turn)
    assert all(len(turns) == 1 for turns in calls.values())
    assert [number for number, (turn,) in sorted(calls.items()) if turn == 0] == [
        *(2**power for power in range(1, 11)), 2048, 3072, 4096,
    ]  # fmt: skip
    assert [number for number, (turn,) in sorted(calls.items()) if turn == 4][:3] == [12, 20, 36]


@on_ranks(2, simulated=True)
def test_a_recomputation_does_what_its_forward_did():
    weight = parameter(4, 4)
    captured = vd.capture(lambda x: torch.tanh(x @ weight))
    found = []
    for function in (captured, captured.function):
        weight.grad = None
        for seed in range(8):
            x = spread(rows(seed=seed)).requires_grad_()
            torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False).sum().backward()
        found.append(weight.grad.full_tensor())
    assert torch.equal(*found)
    assert captured.comparisons


@pytest.mark.slow
@on_ranks(2, simulated=True)
def test_a_change_before_call_1100_is_noticed_in_call_2048():
    box = SimpleNamespace(scale=2.0)

    def change():
        box.scale = 3.0

    captured = vd.capture(lambda x: x * box.scale)
    number, _ = called(captured, 1100, change, until=2100)
    assert number == 2048
    assert captured.comparisons == 11


@on_ranks(2, simulated=True)
def test_calls_that_share_casts_are_left_uncompared():
    """Autocast keeps casts of parameters: gradients of all calls of a region add up in those."""
    found = []
    for check in (ReplayCheck(), None):
        torch.manual_seed(0)
        weight = spread(rows(), Replicate()).requires_grad_()
        captured = vd.capture(lambda x, weight=weight: x @ weight.T, check=check)
        for seed in range(4):
            with torch.autocast("cpu", torch.bfloat16):
                both = [captured(spread(rows(seed=seed + at))) for at in (0, 9)]
            sum(one.float().sum() for one in both).backward()
        assert (captured.comparisons, captured.replays) == (0, 7)
        assert (captured.uncompared is None) == (check is None)
        found.append(weight.grad.full_tensor())
    assert torch.equal(*found)
