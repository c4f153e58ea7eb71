"""`experimental.flex_attention`: torch's numbers, with rows, heads and batches sharded.

Forward is held to torch's function on one device, run eagerly; backward, which torch has none of on
CPUs, to attention that is written out.
"""

import pytest
import torch
import vescale_dtensor as vd
from on_mesh import on_mesh
from torch.nn.attention import flex_attention as of_torch
from torch.nn.attention.flex_attention import create_block_mask
from vescale_comm import SimulationError, simulate, trace
from vescale_dtensor import Shard, distribute_tensor
from vescale_dtensor.experimental import flex_attention

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")
TOKENS = 12
DOCUMENTS = torch.tensor([0] * 3 + [1] * 5 + [2] * 4)
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.1])


def causal(batch, head, row, key):
    return row >= key


def packed(batch, head, row, key):
    return (DOCUMENTS[row] == DOCUMENTS[key]) & (row >= key)


def by_batch(batch, head, row, key):
    """Of the second batch, rows of the first document see nothing."""
    return (batch == 0) | ((row >= 3) & (row - key < 4))


def slopes(score, batch, head, row, key):
    return score + SLOPES[head] * (key - row) + 0.1 * batch


MODS = {
    "none": (None, None),
    "causal": (None, causal),
    "documents": (slopes, packed),
    "rows that see nothing": (slopes, by_batch),
}
HEADS = [(4, 4), (4, 2), (3, 1)]
LAYOUTS = {
    "rows": [Shard(2)],
    "stripes": [vd.InterleavedShard(2, 3)],
    "heads": [Shard(1)],
    "batch": [Shard(0)],
    "none": [vd.Replicate()],
    "rows and heads": [Shard(2), Shard(1)],
    "batch and rows": [Shard(0), Shard(2)],
}


def tensors(heads, keys, tokens=TOKENS):
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(2, n, tokens, 8, generator=draw) for n in (heads, keys, keys)]


def masked(mask_mod, tokens=TOKENS):
    return mask_mod and create_block_mask(mask_mod, 2, None, tokens, tokens, device="cpu")


def weighed(found):
    return (found * torch.linspace(-1, 1, found.numel()).view(found.shape)).sum()


def alone(mods, heads):
    """The result of torch's function, and gradients of attention that is written out."""
    score_mod, mask_mod = MODS[mods]
    parts = tensors(*heads)
    with torch.compiler.set_stance("force_eager"):
        args = (*parts, score_mod, masked(mask_mod), None, heads[0] != heads[1])
        wanted = of_torch.flex_attention(*args)
    query, key, value = (one.requires_grad_() for one in parts)
    key, value = (one.repeat_interleave(heads[0] // heads[1], 1) for one in (key, value))
    index = torch.meshgrid(*map(torch.arange, (2, heads[0], TOKENS, TOKENS)), indexing="ij")
    scores = query @ key.mT / 8**0.5
    scores = scores if score_mod is None else score_mod(scores, *index)
    if mask_mod is not None:
        scores = scores.masked_fill(~mask_mod(*index), -1e30)
    weights = torch.softmax(scores, -1)
    if mask_mod is not None:
        weights = weights * mask_mod(*index)
    weighed(weights @ value).backward()
    return wanted, [one.grad for one in parts]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("mods", MODS)
def test_results_and_gradients_are_those_of_one_device(mods, heads):
    score_mod, mask_mod = MODS[mods]

    def program(rank, world_size):
        found = []
        for layout in LAYOUTS.values():
            mesh = vd.init_device_mesh("cpu", (4,) if len(layout) == 1 else (2, 2))
            parts = [distribute_tensor(one, mesh, layout) for one in tensors(*heads)]
            parts = [one.requires_grad_() for one in parts]
            grouped = heads[0] != heads[1]
            out = flex_attention(*parts, score_mod, masked(mask_mod), enable_gqa=grouped)
            assert out.placements == tuple(layout)
            weighed(out).backward()
            found.append((out.full_tensor().detach(), [one.grad.full_tensor() for one in parts]))
        return found

    wanted, gradients = alone(mods, heads)
    for each in simulate(4).run(program):
        for out, others in each:
            torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(others, gradients, rtol=1e-4, atol=1e-5)


def test_keys_are_gathered_and_nothing_else():
    def program(mesh):
        parts = [distribute_tensor(one, mesh, [Shard(2)]) for one in tensors(4, 4)]
        parts = [one.requires_grad_() for one in parts]
        for _ in range(3):  # what ranks hold is compared at the first calls
            with trace() as sent:
                found = flex_attention(*parts, None, masked(causal))
                torch.autograd.grad(found, parts, torch.ones_like(found))
        return [record.op for record in sent.records]

    for ops in on_mesh((4,), program):
        assert ops == ["all_gather"] * 2 + ["reduce_scatter"] * 2


def learned(score, batch, head, row, key):
    return score + torch.ones((), requires_grad=True)


def failing(score, batch, head, row, key):
    raise ZeroDivisionError


REFUSED = {
    "a mask of other rows": (vd.LayoutError, lambda: {"block_mask": masked(causal, 16)}),
    "a gradient of what is captured": (vd.UnsupportedError, lambda: {"score_mod": learned}),
    "a function that raises": (ZeroDivisionError, lambda: {"score_mod": failing}),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("tokens", [TOKENS, 2])
def test_what_is_refused_is_refused_on_every_rank(what, tokens):
    kind, words = REFUSED[what]

    def program(mesh):
        parts = [distribute_tensor(one, mesh, [Shard(2)]) for one in tensors(4, 4, tokens)]
        with trace() as sent, pytest.raises(kind):
            flex_attention(*parts, **words())
        return len(sent.records)

    assert on_mesh((4,), program) == [0] * 4


@pytest.mark.parametrize(("heads", "keys"), [(4, 2), (4, 3)])
def test_heads_that_do_not_fit(heads, keys):
    def program(mesh):
        flex_attention(*[distribute_tensor(x, mesh, [Shard(2)]) for x in tensors(heads, keys)])

    with pytest.raises(SimulationError) as caught:
        on_mesh((4,), program)
    assert {type(one) for one in caught.value.errors.values()} == {vd.LayoutError}


def test_fewer_rows_than_ranks():
    def program(mesh):
        parts = [distribute_tensor(one, mesh, [Shard(2)]) for one in tensors(4, 4, 2)]
        return flex_attention(*parts, slopes, masked(causal, 2)).full_tensor()

    with torch.compiler.set_stance("force_eager"):
        wanted = of_torch.flex_attention(*tensors(4, 4, 2), slopes, masked(causal, 2))
    for found in on_mesh((4,), program):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
