"""Ops as autocast sees them: one of each kind on torch's lists for CPU, and of what is on none.

The lists (of torch/test/autocast and aten/src/ATen/autocast_mode.h): in low precision, in float32,
in the widest dtype of the operands. Rules of ours compose some ops of others, so those that are on
no list are here, too.
"""

import torch
import torch.nn.functional as F
from torch import linalg


def numbers(*shape):
    generator = torch.Generator().manual_seed(len(shape) * 7 + sum(shape))
    return torch.randn(*shape, generator=generator)


def positive(*shape):
    return numbers(*shape).abs() + 0.1


def definite():
    half = numbers(6, 5, 5)
    return half @ half.mT + torch.eye(5) * 3


LABELS = torch.tensor([1, 0, 3, 2, 1, 4, 0])
SIGNS = torch.tensor([1, -1, 1, 1, -1, 1, 1])
SIGNED, WAVE = SIGNS.reshape(7, 1).expand(7, 5), numbers(3, 32)
ROWS = numbers(7), numbers(7).flip(0)
A, B, C = numbers(7, 5), numbers(7, 5).flip(0), numbers(7, 5).roll(1, 0)
SQUARE, OTHER = numbers(7, 7), numbers(7, 7).flip(0)
Q, K = numbers(3, 4, 5, 6), numbers(3, 4, 7, 6)
IMAGES, VOLUMES = numbers(5, 4, 6, 6), numbers(3, 4, 6, 6, 6)
sdpa = F.scaled_dot_product_attention

LOW = {
    "mm": (torch.mm, (A, numbers(5, 6))),
    "matmul": (torch.matmul, (numbers(2, 3, 4, 5), numbers(5, 6))),
    "matmul of vectors": (torch.matmul, ROWS),
    "bmm": (torch.bmm, (numbers(3, 4, 5), numbers(3, 5, 6))),
    "baddbmm": (torch.baddbmm, (numbers(3, 4, 6), numbers(3, 4, 5), numbers(3, 5, 6))),
    "addmm": (torch.addmm, (numbers(6), A, numbers(5, 6))),
    "addbmm": (torch.addbmm, (numbers(4, 6), numbers(3, 4, 5), numbers(3, 5, 6))),
    "linear": (F.linear, (A, numbers(6, 5), numbers(6))),
    "vecdot": (linalg.vecdot, (A, B)),
    "einsum": (
        lambda a, b: torch.einsum("bik,bjk->bij", a, b),
        (numbers(3, 4, 5), numbers(3, 6, 5)),
    ),
    "tensordot": (lambda a, b: torch.tensordot(a, b, 1), (A, numbers(5, 6))),
    "inner": (torch.inner, (A, numbers(6, 5))),
    "multi_dot": (lambda *m: linalg.multi_dot(m), (A, numbers(5, 6), numbers(6, 4))),
    "conv1d": (F.conv1d, (numbers(5, 4, 9), numbers(6, 4, 3), numbers(6))),
    "conv2d": (F.conv2d, (IMAGES, numbers(6, 4, 3, 3), numbers(6))),
    "conv3d": (F.conv3d, (numbers(3, 4, 5, 5, 5), numbers(6, 4, 3, 3, 3))),
    "conv_transpose1d": (F.conv_transpose1d, (numbers(5, 4, 9), numbers(4, 6, 3))),
    "conv_transpose2d": (F.conv_transpose2d, (IMAGES, numbers(4, 6, 3, 3))),
    "conv_tbc": (torch.conv_tbc, (numbers(9, 5, 4), numbers(3, 4, 6), numbers(6))),
    "prelu": (F.prelu, (numbers(5, 4, 3), numbers(4))),
    "attention": (sdpa, (Q, K, K.flip(0))),
    "attention, causal": (lambda q, k: sdpa(q, k, k, is_causal=True), (Q, Q.flip(0))),
    "attention, dropout": (lambda q, k: sdpa(q, k, k, dropout_p=0.3), (Q, K)),
    "attention, dropout, mask": (
        lambda q, k, m: sdpa(q, k, k, m, dropout_p=0.3),
        (Q, K, numbers(5, 7)),
    ),
    "attention, groups": (
        lambda q, k: sdpa(q, k, k, enable_gqa=True),
        (numbers(3, 6, 5, 4), numbers(3, 3, 5, 4)),
    ),
    "attention of several heads": (
        lambda x, w, b, o, c: F.multi_head_attention_forward(
            x, x, x, 6, 2, w, b, None, None, False, 0.0, o, c, need_weights=False
        )[0],
        # Weights as a layer has them: a softmax of large scores makes much of every rounding.
        (numbers(5, 3, 6), 0.4 * numbers(18, 6), numbers(18), numbers(6, 6), numbers(6)),
    ),
    "two layers": (
        lambda x, up, down: F.linear(F.gelu(F.linear(x, up)), down),
        (A, numbers(6, 5), numbers(5, 6)),
    ),
}
SINGLE = {
    "avg_pool3d": (lambda x: F.avg_pool3d(x, 2), (VOLUMES,)),
    "max_pool3d": (lambda x: F.max_pool3d(x, 2), (VOLUMES,)),
    "adaptive_avg_pool3d": (lambda x: F.adaptive_avg_pool3d(x, 2), (VOLUMES,)),
    "adaptive_max_pool3d": (lambda x: F.adaptive_max_pool3d(x, 2), (VOLUMES,)),
    "grid_sample": (
        lambda a, b: F.grid_sample(a, b, align_corners=False),
        (numbers(3, 4, 5, 5), numbers(3, 4, 4, 2)),
    ),
    "pad reflect": (lambda x: F.pad(x, (1, 2), mode="reflect"), (numbers(3, 4, 6),)),
    "pad replicate": (lambda x: F.pad(x, (1, 2, 1, 1), mode="replicate"), (IMAGES,)),
    "pad circular": (lambda x: F.pad(x, (1, 2, 1, 1), mode="circular"), (IMAGES,)),
    "polar": (torch.polar, (positive(7, 5), A)),
    "prod": (lambda a: a.prod(), (A,)),
    "quantile": (lambda a: a.quantile(0.3, 0), (A,)),
    "nanquantile": (lambda a: a.nanquantile(0.3), (A,)),
    "cdist": (torch.cdist, (A, numbers(6, 5))),
    "trace": (torch.trace, (A,)),
    "view_as_complex": (torch.view_as_complex, (numbers(7, 5, 2),)),
    "cholesky": (linalg.cholesky, (definite(),)),
    "inverse": (torch.inverse, (definite(),)),
    "solve": (linalg.solve, (definite(), numbers(6, 5, 2))),
    "qr": (lambda a: linalg.qr(a)[1].abs(), (definite(),)),
    "svdvals": (linalg.svdvals, (definite(),)),
    "eigvalsh": (linalg.eigvalsh, (definite(),)),
    "fft": (torch.fft.rfft, (numbers(7, 6),)),
    "ifft": (lambda a: torch.fft.irfft(torch.fft.rfft(a)), (numbers(7, 6),)),
    "stft": (lambda a: torch.stft(a, 8, return_complex=True, window=torch.ones(8)), (WAVE,)),
    "binary_cross_entropy": (lambda a, b: F.binary_cross_entropy(a.sigmoid(), b.sigmoid()), (A, B)),
    "binary_cross_entropy_with_logits": (
        lambda a, b: F.binary_cross_entropy_with_logits(a, b.sigmoid()),
        (A, B),
    ),
    "mse_loss": (F.mse_loss, (A, B)),
    "l1_loss": (F.l1_loss, (A, B)),
    "smooth_l1_loss": (F.smooth_l1_loss, (A, B)),
    "huber_loss": (F.huber_loss, (A, B)),
    "poisson_nll_loss": (F.poisson_nll_loss, (A, positive(7, 5))),
    "kl_div": (
        lambda a, b: F.kl_div(a.log_softmax(1), b.softmax(1), reduction="batchmean"),
        (A, B),
    ),
    "cosine_embedding_loss": (lambda a, b: F.cosine_embedding_loss(a, b, SIGNS), (A, B)),
    "hinge_embedding_loss": (lambda a: F.hinge_embedding_loss(a, SIGNED), (A,)),
    "soft_margin_loss": (lambda a: F.soft_margin_loss(a, SIGNED), (A,)),
    "margin_ranking_loss": (lambda a, b: F.margin_ranking_loss(a, b, SIGNS), ROWS),
    "triplet_margin_loss": (F.triplet_margin_loss, (A, B, C)),
    "multi_margin_loss": (lambda a: F.multi_margin_loss(a, LABELS), (A,)),
    "multilabel_margin_loss": (
        lambda a: F.multilabel_margin_loss(a, torch.tensor([[3, 0, -1, 1, 2]] * 7)),
        (A,),
    ),
    "nll_loss": (lambda a: F.nll_loss(a.log_softmax(1), LABELS), (A,)),
    "cross_entropy": (lambda a: F.cross_entropy(a, LABELS), (A,)),
    "cross_entropy, weighted": (
        lambda a, w: F.cross_entropy(a, LABELS, w.abs().detach()),
        (A, numbers(5)),
    ),
    "cross_entropy of shares": (lambda a, b: F.cross_entropy(a, b.softmax(1)), (A, B)),
    "cross_entropy after a layer": (
        lambda x, w: F.cross_entropy(F.linear(x, w), LABELS),
        (A, numbers(6, 5)),
    ),
    "ctc_loss": (
        lambda a: F.ctc_loss(
            a.log_softmax(2),
            torch.tensor([[1, 2], [2, 3], [1, 1]]),
            torch.tensor([7, 7, 7]),
            torch.tensor([2, 2, 2]),
        ),
        (numbers(7, 3, 5),),
    ),
}
WIDEST = {
    "stack": (lambda a, b: torch.stack([a @ b, a]), (SQUARE, OTHER)),
    "cat": (lambda a, b: torch.cat([a @ b, a]), (SQUARE, OTHER)),
    "index_copy": (
        lambda a, b: (a @ b).index_copy(0, torch.tensor([1, 3]), a[:2]),
        (SQUARE, OTHER),
    ),
}
NONE = {
    "softmax": (lambda a: a.softmax(-1), (A,)),
    "log_softmax": (lambda a: a.log_softmax(0), (A,)),
    "softmax, float32": (lambda a: a.softmax(0, dtype=torch.float32), (A,)),
    "sum": (lambda a: a.sum(), (A,)),
    "mean": (lambda a: a.mean(), (A,)),
    "mean of much": (lambda a: (a * 3e4).abs().mean(), (A,)),
    "var": (lambda a: a.var(), (A + 4,)),
    "std": (lambda a: a.std(0), (A + 4,)),
    "var_mean": (lambda a: torch.stack(torch.var_mean(a, 1)), (A + 4,)),
    "norm": (lambda a: a.norm(), (A,)),
    "norm of much": (lambda a: (a * 1e3).norm(), (A,)),
    "3-norm": (lambda a: a.norm(p=3, dim=1), (A,)),
    "matrix_norm": (linalg.matrix_norm, (numbers(3, 7, 5),)),
    "logsumexp": (lambda a: a.logsumexp(0), (A,)),
    "cumsum": (lambda a: a.cumsum(0), (A,)),
    "cumprod": (lambda a: a.cumprod(0), (A,)),
    "logcumsumexp": (lambda a: a.logcumsumexp(0), (A,)),
    "layer_norm": (lambda a, w, b: F.layer_norm(a, (5,), w, b), (A, numbers(5), numbers(5))),
    "rms_norm": (lambda a, w: F.rms_norm(a, (5,), w), (A, numbers(5))),
    "group_norm": (lambda a, w: F.group_norm(a, 2, w), (numbers(5, 4, 6), numbers(4))),
    "batch_norm": (
        lambda a, w: F.batch_norm(a, None, None, w, None, True),
        (numbers(5, 4, 6), numbers(4)),
    ),
    "instance_norm": (F.instance_norm, (numbers(5, 4, 6),)),
    "embedding": (lambda w: F.embedding(LABELS, w), (numbers(6, 5),)),
    "gelu": (F.gelu, (A,)),
    "exp": (torch.exp, (A,)),
    "cube": (lambda a: a**3, (A,)),
    "times": (lambda a, b: a * b, (A, B)),
    "amax": (lambda a: a.amax(0), (A,)),
    "max": (lambda a: a.max(1)[0], (A,)),
    "topk": (lambda a: a.topk(2, 1)[0], (A,)),
    "sort": (lambda a: a.sort(1)[0], (A,)),
    "normalize": (lambda a: F.normalize(a, dim=1), (A,)),
    "cosine_similarity": (F.cosine_similarity, (A, B)),
    "pairwise_distance": (F.pairwise_distance, (A, B)),
    "dist": (torch.dist, (A, B)),
    "addcmul": (torch.addcmul, (A, B, C)),
    "cov": (torch.cov, (numbers(4, 7),)),
    "dot": (torch.dot, ROWS),
    "mv": (torch.mv, (A, numbers(5))),
    "outer": (torch.outer, (numbers(7), numbers(5))),
    "kron": (torch.kron, (numbers(3, 2), numbers(2, 3))),
    "bilinear": (F.bilinear, (A, numbers(7, 4), numbers(6, 5, 4))),
    "matrix_exp": (torch.matrix_exp, (definite() / 9,)),
    "dropout": (lambda a: F.dropout(a, 0.3), (A,)),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), (IMAGES,)),
    "where": (lambda a, b: torch.where(a > 0, a @ b, a), (SQUARE, OTHER)),
}
CASES = {"low": LOW, "single": SINGLE, "widest": WIDEST, "none": NONE}
