"""What stages tell each other is read as it was written."""

import pytest
import torch
from vescale_dtensor import InterleavedShard, Partial, RaggedShard, Replicate, Shard, StridedShard
from vescale_parallel import PipelineError
from vescale_parallel._pipeline.described import Described, TensorSpec
from vescale_parallel._pipeline.text import from_text, to_text

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


def test_other_values_are_refused():
    with pytest.raises(PipelineError, match="object"):
        to_text([object()])
