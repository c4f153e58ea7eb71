"""Defines the settings of an estimate: batch, precision, and what is recomputed."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Bytes of an element by its use; the default is bf16 compute with float32 master weights.

    Attributes:
        stored: a parameter between steps.
        compute: a parameter and an activation in forward and backward, and a gathered parameter.
        gradient: a gradient that is kept until the update.
        wire: a gradient while ranks add it up.
        state: all that the optimizer keeps of a parameter; Adam's two moments in float32.
    """

    stored: int = 4
    compute: int = 2
    gradient: int = 4
    wire: int = 4
    state: int = 8


FLOAT32 = Precision(compute=4)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One training step.

    Attributes:
        tokens: of the global batch.
        sequence: tokens that attend to each other (causally); 0: no attention.
        recompute: whether backward computes each unit again from its input.
        regions: modules that are computed again, and for each the families of operators whose
            results are kept all the same; looked at where `recompute` is not set.
        sequence_parallel: whether activations outside of tensor-parallel regions are sharded too.
        queries: glob over the weights that make queries, whose output attends.
        lookups: glob over parameters that are looked up, and not multiplied with.
        turns: microbatches that run one after another; gradients are reduced behind the last.
        prefetch: units that are gathered ahead of the one that computes.
        reduce_ahead: units whose gradients are on their way beside those of the one that computes.
    """

    tokens: int
    sequence: int = 0
    recompute: bool = False
    regions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sequence_parallel: bool = False
    queries: str = "*{q,q_proj,wq,query}.weight"
    lookups: str = "*emb*"
    turns: int = 1
    prefetch: int = 1
    reduce_ahead: int = 0
