"""What stages tell each other is read as it was written."""

from collections import namedtuple

import pytest
import torch
from vescale_dtensor import InterleavedShard, Partial, RaggedShard, Replicate, Shard, StridedShard
from vescale_parallel import PipelineError
from vescale_parallel._pipeline.described import Described, TensorSpec
from vescale_parallel._pipeline.text import from_text, to_text

Pair = namedtuple("Pair", "first second")
PLACEMENTS = [
    Shard(1),
    Replicate(),
    Partial("avg"),
    RaggedShard((0, 1), (1, 0, 2)),
    InterleavedShard(0, 3),
    StridedShard(0, 2),
]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_placements(placement: object):
    spec = TensorSpec(torch.bfloat16, (2, 3), (3, 1), (placement,), (4, 3), (3, 1), True)
    assert from_text(to_text(spec)) == spec
    described = Described({"a": [1, "b", None]}, (spec,))
    assert from_text(to_text(described)) == described


def test_named_tuples_of_modules():
    found = from_text(to_text({"a": Pair(1, [Pair("b", None)])}))
    assert found == {"a": Pair(1, [Pair("b", None)])}
    assert type(found["a"]) is type(found["a"].second[0]) is Pair


@pytest.mark.parametrize("value", [object(), namedtuple("Nowhere", "x")(1)])
def test_other_values_are_refused(value: object):
    with pytest.raises(PipelineError, match=type(value).__name__):
        to_text([value])
