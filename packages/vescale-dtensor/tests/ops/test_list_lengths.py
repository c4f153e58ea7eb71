"""Functions of lists refuse lists of different lengths, with torch's error and on every rank.

They neither leave out what is too many nor fail on what is missing, and write to nothing. Numbers
in a list belong to their elements: a stored call answers those of equal effect only. Backwards do
not depend on how many rows of an element a rank has.
"""

import pytest
import torch
from on_mesh import on_mesh
from vescale_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor

CALLS = {
    "fewer tensors": lambda x: torch._foreach_add(x, x[:1]),
    "more tensors": lambda x: torch._foreach_add(x[:1], x),
    "by name": lambda x: torch._foreach_sub(x, other=x[:1]),
    "no tensors": lambda x: torch._foreach_mul_(x, []),
    "fewer numbers": lambda x: torch._foreach_mul_(x, [2.0]),
    "more numbers": lambda x: torch._foreach_mul(x, [1.0, 2.0, 3.0]),
    "a third list": lambda x: torch._foreach_addcmul_(x, x, x[:1], value=2.0),
    "scalars": lambda x: torch._foreach_addcdiv(x, x, x, [1.0]),
    "named scalars": lambda x: torch._foreach_addcdiv(x, x, x, scalars=[1.0]),
    "weights": lambda x: torch._foreach_lerp(x, x, [0.5]),
    "copies": lambda x: torch._foreach_copy_(x, x[:1]),
    "powers": lambda x: torch._foreach_pow(x, [2.0]),
    "bounds": lambda x: torch._foreach_clamp_min_(x, [1.0]),
    "maxima": lambda x: torch._foreach_maximum(x, x[:1]),
}


def refusal(call, tensors):
    with pytest.raises(RuntimeError) as refused:
        call(tensors)
    return str(refused.value)


@pytest.mark.parametrize("name", CALLS)
def test_torchs_error(name):
    call, plain = CALLS[name], [torch.ones(4), torch.ones(3)]

    def run(mesh):
        for placement in (Replicate(), Shard(0)):
            tensors = [distribute_tensor(x, mesh, [placement]) for x in plain]
            for grad in (False, True):
                with torch.set_grad_enabled(grad):
                    assert refusal(call, tensors) == refusal(call, plain)
            for ours, x in zip(tensors, plain, strict=True):
                assert torch.equal(ours.full_tensor(), x)

    on_mesh((4,), run)


def test_numbers_in_a_list_count_by_value_where_the_rule_reads_them():
    def run(mesh):
        owed = [DTensor.from_local(torch.full((2,), 1.0), mesh, [Partial()]) for _ in range(2)]
        with torch.no_grad():
            for powers in ([1.0, 1.0], [2.0, 3.0], [1, 1], [0.0, 2.0], [1.0, 1.0]):
                expected = torch._foreach_pow([torch.full((2,), 4.0)] * 2, powers)
                found = [x.full_tensor() for x in torch._foreach_pow(owed, powers)]
                torch.testing.assert_close(found, list(expected))

    on_mesh((4,), run)


def test_the_order_of_integers_and_floats_in_a_list():
    plain = [torch.arange(4), torch.arange(3)]

    def run(mesh):
        tensors = [distribute_tensor(x, mesh, [Shard(0)]) for x in plain]
        with torch.no_grad():
            for factors in ([1, 2.0], [2.0, 1], [1, 2], [1.0, 2.0], [2.0, 1]):
                for ours, x in zip(
                    torch._foreach_mul(tensors, factors),
                    torch._foreach_mul(plain, factors),
                    strict=True,
                ):
                    assert ours.dtype == ours.to_local().dtype == x.dtype
                    assert torch.equal(ours.full_tensor(), x)

    on_mesh((4,), run)


def test_factors_in_a_tensor():
    plain, factors = [torch.ones(4), torch.ones(3)], torch.tensor([1.0, 2.0])

    def run(mesh):
        tensors = [distribute_tensor(x, mesh, [Shard(0)]) for x in plain]
        for func in (torch._foreach_addcdiv, torch._foreach_addcmul):
            for given in (factors, factors + 1, factors):
                expected = func(plain, plain, plain, given)
                found = func(tensors, tensors, tensors, given)
                assert all(
                    torch.equal(ours.full_tensor(), x)
                    for ours, x in zip(found, expected, strict=True)
                )

    on_mesh((4,), run)


def divided_by_lists(lists):
    written = [x * 1 for x in lists[1]]
    torch._foreach_addcdiv_(written, lists[0], lists[2], value=0.5)
    return [*torch._foreach_addcdiv(*lists, scalars=[1.0, 2.0, 3.0]), *written]


@pytest.mark.parametrize("rows", [3, 4])
def test_gradients_of_quotients_where_ranks_have_fewer_rows_than_there_are_tensors(rows):
    generator = torch.Generator().manual_seed(rows)
    values = torch.rand(3, 3, rows, 2, generator=generator, dtype=torch.float64) + 0.5

    def gradients(lists):
        leaves = [x for each in lists for x in each]
        total = sum((x * x).sum() for x in divided_by_lists(lists))
        return torch.autograd.grad(total, leaves)

    def program(mesh):
        lists = [
            [distribute_tensor(x, mesh, [Shard(0)]).requires_grad_() for x in each]
            for each in values
        ]
        return [x.full_tensor() for x in gradients(lists)]

    expected = gradients([[x.clone().requires_grad_() for x in each] for each in values])
    for found in on_mesh((2,), program):
        for own, one in zip(found, expected, strict=True):
            torch.testing.assert_close(own, one)
