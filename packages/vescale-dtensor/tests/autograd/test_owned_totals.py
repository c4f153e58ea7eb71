"""Totals that a reducer does not keep become `.grad` as they are, where nobody has looked at it.

Where somebody has, or something is recorded, they are written into what is there. The bits are the
same, and gradients in one buffer are tensors like any others.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import vescale_dtensor as vd
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from vescale_comm import all_reduce_bucketed, group_of
from vescale_comm.testing import on_ranks
from vescale_dtensor import storage
from vescale_dtensor.storage import reduce_gradients


class Place:
    """Three parameters, and the totals that their reducer has made."""

    def __init__(self, owned: bool = True) -> None:
        self.mesh = vd.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        self.totals: list[Tensor] = []
        made = [torch.arange(6.0).view(2, 3) + i for i in range(3)]
        self.parameters = [
            nn.Parameter(vd.distribute_tensor(one, self.mesh, [vd.Replicate()])) for one in made
        ]
        storage.set_gradient_reducer(self.parameters, self._reduced, owned=owned)

    def _reduced(self, pending: list[storage.PendingGradient]) -> list[Tensor]:
        group = group_of(self.mesh, ("dp",))
        self.totals = all_reduce_bucketed([one.local for one in pending], group)
        return self.totals

    def batch(self, times: float = 1.0) -> Tensor:
        return vd.distribute_tensor(torch.arange(8.0).view(4, 2) * times, self.mesh, [vd.Shard(0)])

    def backward(self, times: float = 1.0, x: Any = None) -> None:
        x = self.batch(times) if x is None else x
        sum((x @ one).square().sum() for one in self.parameters).backward()

    def reduce(self) -> list[bool]:
        """Reduce all; which gradients are what the reducer returned."""
        reduce_gradients(self.parameters)
        addresses = {one.data_ptr() for one in self.totals}
        return [locals_([p])[0].data_ptr() in addresses for p in self.parameters]

    def values(self) -> list[Tensor]:
        return [one.clone() for one in locals_(self.parameters)]


def locals_(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The local tensors that are `.grad`, without looking at `.grad`."""
    found = [one._local_tensor.grad for one in parameters]
    assert all(one is not None for one in found)
    return found


def expected(times: Iterable[float]) -> list[Tensor]:
    """Gradients of one device, accumulated."""
    made = [(torch.arange(6.0).view(2, 3) + i).requires_grad_() for i in range(3)]
    for factor in times:
        x = torch.arange(8.0).view(4, 2) * factor
        sum((x @ one).square().sum() for one in made).backward()
    return [one.grad for one in made]


def same(found: Iterable[Tensor], wanted: Iterable[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


@on_ranks(2, simulated=True)
def test_totals_become_gradients_without_a_copy():
    place = Place()
    for _ in range(3):
        place.backward()
        assert place.reduce() == [True] * 3
        assert same(place.values(), expected([1.0]))
        # No views of each other, and no common count of writes, on which autograd relies.
        one, other, _ = locals_(place.parameters)
        assert not one._is_view()
        before = other._version
        one.mul_(2)
        assert other._version == before
        assert same(locals_(place.parameters)[1:], expected([1.0])[1:])
        for p in place.parameters:
            p.grad = None


@on_ranks(2, simulated=True)
def test_what_follows_accumulates_and_what_was_kept_stays():
    place = Place()
    place.backward()
    place.reduce()
    kept = place.parameters[0].grad
    assert kept is not None
    place.backward(2.0)  # adds to what was adopted
    # The first is what somebody holds, so that all stay where they are.
    assert place.reduce() == [False] * 3
    assert same(place.values(), expected([1.0, 2.0]))
    assert torch.equal(kept.full_tensor(), expected([1.0, 2.0])[0])
    for p in place.parameters[1:]:
        p.grad = None
    assert torch.equal(kept.full_tensor(), expected([1.0, 2.0])[0])
    place.parameters[0].grad = None
    place.backward(3.0)
    assert place.reduce() == [True] * 3
    assert torch.equal(kept.full_tensor(), expected([1.0, 2.0])[0])
    assert same(place.values(), expected([3.0]))


@on_ranks(2, simulated=True)
def test_twice_without_anybody_looking():
    place = Place()
    for number in range(1, 4):
        place.backward()
        assert place.reduce() == [True] * 3
        assert same(place.values(), expected([1.0] * number))


def look(place: Place) -> Any:
    return place.parameters[1].grad


def view(place: Place) -> Any:
    return place.parameters[1].grad[0]  # type: ignore[index]


def strides(place: Place) -> Any:
    local = place.parameters[1]._local_tensor
    local.grad = local.grad.t().contiguous().t()


@pytest.mark.parametrize("before", [look, view, strides])
@on_ranks(2, simulated=True)
def test_who_has_looked_sees_the_total(before: Callable[[Place], Any]):
    place = Place()
    place.backward()
    held = before(place)
    addresses = [one.data_ptr() for one in locals_(place.parameters)]
    # All or none: a buffer would live beside gradients of their own.
    assert not any(place.reduce())
    assert [one.data_ptr() for one in locals_(place.parameters)] == addresses
    assert same(place.values(), expected([1.0]))
    if held is not None:
        wanted = expected([1.0])[1]
        assert torch.equal(held.full_tensor(), wanted if held.ndim == 2 else wanted[0])


@on_ranks(2, simulated=True)
def test_beside_a_gradient_that_is_assigned():
    place = Place()
    place.backward()
    place.parameters[1].grad = place.parameters[1].grad * 1  # type: ignore[operator]
    assert place.reduce() == [True, False, True]
    assert same(place.values(), expected([1.0]))
    place.backward()
    assert place.reduce() == [True, False, True]
    assert same(place.values(), expected([1.0, 1.0]))


class Passes(TorchFunctionMode):
    """Sees functions and calls them."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


class Counts(TorchDispatchMode):
    """Sees operators and calls them."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Passes, Counts, torch.inference_mode])
@on_ranks(2, simulated=True)
def test_where_others_see_calls_totals_are_written(mode: Callable[[], Any]):
    place = Place()
    place.backward()
    with mode():
        assert not any(place.reduce())
    assert same(place.values(), expected([1.0]))
    place.backward()  # adds to what is there
    assert place.reduce() == [True] * 3
    assert same(place.values(), expected([1.0, 1.0]))


@on_ranks(2, simulated=True)
def test_totals_that_a_reducer_keeps_are_written():
    place = Place(owned=False)
    place.backward()
    assert not any(place.reduce())
    for one in place.totals:
        one.zero_()
    assert same(place.values(), expected([1.0]))


@on_ranks(2, simulated=True)
def test_within_a_backward_and_by_a_program_totals_are_written():
    place = Place()

    def hook(_: Tensor) -> None:
        if not found:
            reduce_gradients(place.parameters)
            found.extend(locals_(place.parameters[:1]))

    found: list[Tensor] = []
    place.parameters[0].register_post_accumulate_grad_hook(hook)
    place.backward()
    place.reduce()
    assert same(place.values(), expected([1.0]))
    # A program has read `.grad` in one step and uses it in another.
    other = Place()

    @partial(vd.capture, unguarded=["totals"])  # which the reducer writes
    def step(x: Tensor) -> Any:
        for p in other.parameters:
            p.grad = None
        other.backward(x=x)
        reduce_gradients(other.parameters)
        return [gradient * 2 for one in other.parameters if (gradient := one.grad) is not None]

    for _ in range(4):
        results = step(other.batch())
        assert same([one.full_tensor() / 2 for one in results], expected([1.0]))
        assert same(other.values(), expected([1.0]))
    assert step._misses.replays >= 2
