"""Attention that torch refuses is refused in its words, on every rank, before anything is sent.

However rows, heads or batches are sharded, and whichever way is asked for; ranks that hold nothing
refuse as all others do. What torch accepts is accepted.
"""

from itertools import chain

import pytest
import torch
import torch.nn.functional as F
import vescale_dtensor as vd
from on_mesh import on_mesh
from vescale_comm import trace

NAN = float("nan")
RANKS = 3
# Of the batch of two the third rank holds nothing.
LAYOUTS = [(2, "auto"), (2, "ring"), (2, "ulysses"), (2, "gather"), (1, "auto"), (0, "auto")]


def parts(*dtypes, heads=(3, 3, 3), rows=(8, 8, 8), widths=(4, 4, 4), batch=(2, 2, 2)):
    draw = torch.Generator().manual_seed(0)
    sizes = zip(batch, heads, rows, widths, strict=True)
    made = [torch.randn(size, generator=draw) for size in sizes]
    return [one.to(dtype) for one, dtype in zip(made, dtypes or [torch.float32] * 3, strict=True)]


def mask(*shape, dtype=torch.bool):
    return {"attn_mask": torch.ones(shape, dtype=dtype)}


I64, F32, F64, BF16 = torch.int64, torch.float32, torch.float64, torch.bfloat16
REFUSED = {
    "a mask of whole numbers": (parts(), mask(8, 8, dtype=I64)),
    "a mask of another precision": (parts(), mask(8, 8, dtype=BF16)),
    "a mask of complex numbers": (parts(), mask(8, 8, dtype=torch.complex64)),
    "a mask of no dims": (parts(), mask()),
    "a mask of one dim": (parts(), mask(8)),
    "a mask of five dims": (parts(), mask(1, 1, 1, 8, 8)),
    "a mask of other heads": (parts(), mask(2, 8, 8)),
    "a mask of more rows": (parts(), mask(16, 8)),
    "a mask of no rows": (parts(), mask(0, 8)),
    "a mask of fewer keys": (parts(), mask(8, 7)),
    "a mask of more batches": (parts(), mask(3, 1, 8, 8)),
    "a mask that is a list": (parts(), {"attn_mask": [[True] * 8] * 8}),
    "a rate of more than one": (parts(), {"dropout_p": 1.5}),
    "a rate in words": (parts(), {"dropout_p": "a half"}),
    "a negative rate": (parts(), {"dropout_p": -0.1}),
    "a rate that is no number": (parts(), {"dropout_p": NAN}),
    "a scale in words": (parts(), {"scale": "small"}),
    "keys of another precision": (parts(F32, F64, F32), {}),
    "values of another precision": (parts(F32, F32, BF16), {}),
    "whole numbers": (parts(I64, I64, I64), {}),
    "complex numbers": (parts(*[torch.complex64] * 3), {}),
    "keys of other features": (parts(widths=(4, 5, 4)), {}),
    "fewer key heads, of no groups": (parts(heads=(6, 3, 3)), {}),
    "groups that are uneven": (parts(heads=(3, 2, 2)), {"enable_gqa": True}),
    "more key heads": (parts(heads=(3, 6, 6)), {"enable_gqa": True}),
    "another batch": (parts(batch=(2, 3, 3)), {}),
    "a word that there is not": (parts(), {"softcap": 3.0}),
}


def attend(given, mesh=None, dim=0, way="auto"):
    """The result; or the error, and how often anything was sent."""
    own, more = given
    if mesh is not None:
        own = [vd.distribute_tensor(one, mesh, [vd.Shard(dim)]) for one in own]
    with trace() as sent, vd.sequence_attention(way):
        try:
            found = F.scaled_dot_product_attention(*own, **more)
        except Exception as error:
            return type(error), str(error), len(sent.records)
    return found.full_tensor() if isinstance(found, vd.DTensor) else found


def everywhere(given, layouts=LAYOUTS):
    """What every rank gets, one after another in every layout."""

    def program(mesh):
        return [attend(given, mesh, *layout) for layout in layouts]

    return list(chain.from_iterable(on_mesh((RANKS,), program)))


@pytest.mark.parametrize("what", REFUSED)
def test_it_is_refused_as_on_one_device(what):
    kind, words, _ = attend(REFUSED[what])
    for found in everywhere(REFUSED[what]):
        assert found[0] is kind
        assert found[1].startswith(words)
        assert found[2] == 0


def test_it_is_refused_after_one_that_is_right():
    """Plans are stored: that of a call must not serve one that torch refuses."""
    right, wrong = (parts(), mask(8, 8)), REFUSED["a mask of whole numbers"]
    for found in everywhere(right):
        torch.testing.assert_close(found, attend(right))
    assert {one[2] for one in everywhere(wrong)} == {0}


def test_sizes_of_long_sequences_are_told_as_they_are():
    """Torch is asked about fewer rows then, as its scores would not fit into memory."""
    own = [one.expand(2, 3, 2**20, 4) for one in parts(rows=(1, 1, 1))]
    for found in everywhere((own, mask(2, 2**20)), [(1, "auto")]):
        assert found[0] is RuntimeError
        assert "f32[2, 3@axis0, 1048576, 4]" in found[1]
        assert "attn_mask: bool[2, 1048576]" in found[1]


@pytest.mark.parametrize("values", [7, 9])
def test_values_that_keys_do_not_fit(values):
    """One device's kernel reads what is behind the values; or leaves some out."""
    for found in everywhere((parts(rows=(8, 8, values)), {})):
        assert found[0] is vd.LayoutError
        assert f"8 keys and {values} values" in found[1]
        assert found[2] == 0


def test_a_rate_that_one_device_overlooks():
    learned = {"attn_mask": torch.zeros(8, 8, requires_grad=True), "dropout_p": -0.5}
    for found in everywhere((parts(), learned)):
        assert found[0] is vd.UnsupportedError
        assert "no probability" in found[1]


ACCEPTED = {
    "three dims": ([one[0] for one in parts()], {}),
    "a scale in a tensor": (parts(), {"scale": torch.tensor(0.3)}),
    "rows that see nothing": (parts(), {"attn_mask": torch.zeros(8, 8).bool()}),
    "infinite numbers": (parts(), {"attn_mask": torch.full((8, 8), -float("inf")).triu(1)}),
    "numbers that are none": (parts(), {"attn_mask": torch.tensor([0.0] * 7 + [NAN]).view(8, 1)}),
    "no batch": (parts(batch=(0, 0, 0)), {}),
}
if torch.__version__ >= "2.12":  # torch 2.11 divides by their number
    ACCEPTED["no heads"] = parts(heads=(0, 0, 0)), {}
if torch.__version__ < "2.14":  # which refuses it
    ACCEPTED["a mask beside is_causal"] = parts(), {**mask(8, 8), "is_causal": True}


@pytest.mark.parametrize("what", ACCEPTED)
def test_what_torch_accepts(what):
    given = ACCEPTED[what]
    layouts = [(1, "auto")] if given[0][0].ndim < 4 else LAYOUTS
    for found in everywhere(given, layouts):
        torch.testing.assert_close(found, attend(given), equal_nan=True)
