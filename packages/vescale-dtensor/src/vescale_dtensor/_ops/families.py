"""All families of operators, and `install`, which registers what they define."""

from __future__ import annotations

from vescale_dtensor._dispatch import registry
from vescale_dtensor._ops.decompositions import index as decomposed_index
from vescale_dtensor._ops.decompositions import linalg as decomposed_linalg
from vescale_dtensor._ops.decompositions import tensor as decomposed_tensor
from vescale_dtensor._ops.index import basic as basic_index
from vescale_dtensor._ops.index import gather, index_put, masked_select, scatter, setitem
from vescale_dtensor._ops.loss import cross_entropy, ctc, elementwise
from vescale_dtensor._ops.loss import decomposed as decomposed_loss
from vescale_dtensor._ops.matmul import einsum, linalg, matmul
from vescale_dtensor._ops.nn import (
    attention,
    conv,
    embedding,
    embedding_bag,
    multihead_attention,
    norm,
    norm_aten,
    pool,
    rnn,
    similarity,
    stft_segment,
)
from vescale_dtensor._ops.optim import foreach, fused, grad_scaler
from vescale_dtensor._ops.pointwise import cast, complex, pointwise
from vescale_dtensor._ops.random import dropout_variants, like_factories, nn_init, sampling
from vescale_dtensor._ops.random import in_place as random_in_place
from vescale_dtensor._ops.reduce import counting, scan, softmax_backward, topk, unique
from vescale_dtensor._ops.reduce import linear as linear_reductions
from vescale_dtensor._ops.reduce import nonlinear as nonlinear_reductions
from vescale_dtensor._ops.tensor import (
    aten_overloads,
    memory_identity,
    metadata,
    refused,
    to_python,
)
from vescale_dtensor._ops.view import (
    as_strided,
    cat_split,
    flip_pad_fft,
    in_place_views,
    reshape,
    transpose,
)

# Each has `RULES`, function -> rule, or `HANDLERS`, function -> handler, or both.
_MODULES = (
    as_strided,
    aten_overloads,
    attention,
    basic_index,
    cast,
    cat_split,
    complex,
    conv,
    counting,
    cross_entropy,
    ctc,
    decomposed_index,
    decomposed_linalg,
    decomposed_loss,
    decomposed_tensor,
    dropout_variants,
    einsum,
    elementwise,
    embedding,
    embedding_bag,
    flip_pad_fft,
    foreach,
    fused,
    gather,
    grad_scaler,
    in_place_views,
    index_put,
    like_factories,
    linalg,
    linear_reductions,
    masked_select,
    matmul,
    memory_identity,
    metadata,
    multihead_attention,
    nn_init,
    nonlinear_reductions,
    norm,
    norm_aten,
    pointwise,
    pool,
    random_in_place,
    refused,
    reshape,
    rnn,
    sampling,
    scan,
    scatter,
    setitem,
    similarity,
    softmax_backward,
    stft_segment,
    to_python,
    topk,
    transpose,
    unique,
)


# What they handle only asks about a tensor, or is refused: no rule could answer for it.
_NO_OPERATORS = (memory_identity, metadata, refused, to_python)


def install() -> None:
    """Fill the tables of the dispatcher; refuses a function that two families answer for."""
    for module in _MODULES:
        registry.install(
            getattr(module, "RULES", {}),
            getattr(module, "HANDLERS", {}),
            constant=metadata.CONSTANT,
            operators=module not in _NO_OPERATORS,
        )
