"""Cases: convolutions, normalisation over batches and groups, pooling, activations, pictures."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from rule_fuzz import T
from rule_table import each


def images(name, calls, *operands, **options):
    """Cases whose results lie as a kernel chooses."""
    each(f"nn {name}", calls, *operands, strides=False, **options)


# Caches of keys and values begin as empty tensors of one dim.
each(
    "nn cat_cache",
    [
        lambda x, y: torch.cat([torch.tensor([], dtype=torch.float64), x, y], dim=-2),
        lambda x, y: torch.cat([x[0, 0, 0, :0], x], 1),
        lambda x, y: torch.cat([x, y[..., :0], y.flatten()[:0]], 3),
        lambda x, y: torch.cat([x.flatten()[:0], y.flatten()[:0]]),
        lambda x, y: torch.cat([x, y.flatten()], 1),
    ],
    T((3, 2, 5, 2)),
    T((3, 2, 5, 2)),
    exact=True,
)

# Convolutions.
IMAGE, KERNEL, BIAS = T((3, 4, 6, 5)), T((5, 4, 3, 2)), T((5,))
CONV = [
    F.conv2d,
    lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1),
    lambda x, w, b: F.conv2d(x, w, b, 1, "same", 2),
    lambda x, w, b: F.conv2d(x, w),
    lambda x, w, b: F.conv2d(x[0], w, bias=b),
    lambda x, w, b: F.conv2d(weight=w, input=x),
    lambda x, w, b: F.conv2d(x, w.transpose(0, 1).contiguous(), b[:4]),
    lambda x, w, b: F.conv_transpose2d(x, w.transpose(0, 1), b),
    lambda x, w, b: F.conv_transpose2d(x, w.transpose(0, 1), b, 2, 1, 1),
    lambda x, w, b: F.conv_transpose2d(x[1], w.transpose(0, 1)),
    lambda x, w, b: F.conv2d(x.to(memory_format=torch.channels_last), w, b),
]
images("conv", CONV, IMAGE, KERNEL, BIAS)
images("conv_few", CONV[:4], T((1, 2, 4, 4)), T((2, 2, 2, 2)), T((2,)))
images("conv_none", CONV[:4], T((0, 2, 4, 4)), T((2, 2, 2, 2)), T((2,)))
images(
    "conv1d",
    [
        F.conv1d,
        lambda x, w, b: F.conv1d(x, w, b, 2),
        lambda x, w, b: F.conv_transpose1d(x, w.transpose(0, 1), b),
        lambda x, w, b: F.conv1d(x.repeat(1, 5, 1), w, b, groups=5),
        lambda x, w, b: F.conv1d(x[:, :1].expand(3, 5, 6), w[:, :1], b, 1, 1, 1, 5),
    ],
    T((3, 3, 6)),
    T((5, 3, 2)),
    BIAS,
)
images(
    "conv3d",
    [F.conv3d, lambda x, w, b: F.conv_transpose3d(x, w.transpose(0, 1), b)],
    T((2, 3, 4, 3, 3)),
    T((5, 3, 2, 2, 2)),
    BIAS,
)
images(
    "conv_groups",
    [
        lambda x, w, b: F.conv2d(x, w, b, groups=6),
        lambda x, w, b: F.conv2d(x, w, None, 1, 0, 1, 6),
        lambda x, w, b: F.conv2d(x, w[:6], b[:6], groups=6, padding=1),
        lambda x, w, b: F.conv2d(x, w.reshape(6, 2, 2, 2), b[:6], groups=3),
        lambda x, w, b: F.conv_transpose2d(x, w[:6], groups=6),
        lambda x, w, b: F.conv_transpose2d(x, w[:6], b[:6], 2, 1, 1, 6),
        lambda x, w, b: F.conv_transpose2d(x, w.reshape(6, 2, 2, 2), b[:6], groups=3),
        lambda x, w, b: F.conv_transpose2d(x[1], w.reshape(6, 2, 2, 2), groups=2),
        lambda x, w, b: F.conv_transpose2d(x, w.reshape(6, 2, 2, 2), b[:5], groups=3),
        lambda x, w, b: F.conv2d(x[0], w, b, groups=6),
        lambda x, w, b: F.conv2d(x, w, b, groups=5),
    ],
    T((2, 6, 4, 4)),
    T((12, 1, 2, 2)),
    T((12,)),
)

# Pooling, and other changes of images.
POOL = [
    lambda x: F.max_pool2d(x, 2),
    lambda x: F.max_pool2d(x, 2, stride=1, padding=1, return_indices=True),
    lambda x: torch.max_pool2d(x, 2),
    lambda x: F.max_pool2d_with_indices(x, 2),
    lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    lambda x: F.adaptive_avg_pool2d(x, (2, 3)),
    lambda x: F.adaptive_max_pool2d(x, 2),
    lambda x: F.adaptive_max_pool2d(x, 2, return_indices=True),
    lambda x: F.adaptive_max_pool2d_with_indices(x, 2),
    lambda x: F.lp_pool2d(x.abs() + 1, 2, 2),
    lambda x: F.avg_pool2d(x[0], 2),
    lambda x: F.max_pool2d(x, 9),
    lambda x: F.interpolate(x, scale_factor=2),
    lambda x: F.interpolate(x, (3, 8), mode="bilinear", align_corners=True),
    lambda x: F.interpolate(x, (9, 3), mode="bicubic"),
    lambda x: F.interpolate(x, 4, mode="area"),
    lambda x: F.upsample(x, scale_factor=2),
    lambda x: F.upsample_nearest(x, scale_factor=2),
    lambda x: F.upsample_bilinear(x, scale_factor=2),
    lambda x: F.pixel_shuffle(x, 2),
    lambda x: F.pixel_unshuffle(x, 1),
    lambda x: F.channel_shuffle(x, 2),
    lambda x: torch.native_channel_shuffle(x, 2),
    lambda x: F.unfold(x, 2),
    lambda x: F.fold(F.unfold(x, 2), x.shape[-2:], 2),
    lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2, output_size=x.shape),
    lambda x: F.local_response_norm(x, 2),
    lambda x: F.max_pool1d(x[0], 2),
    lambda x: F.max_pool1d(x[0], 2, return_indices=True),
    lambda x: torch.max_pool1d(x[0], 2),
    lambda x: F.max_pool1d_with_indices(x[0], 2),
    lambda x: F.avg_pool1d(x[0], 2),
    lambda x: F.adaptive_avg_pool1d(x[0], 2),
    lambda x: F.adaptive_max_pool1d(x[0], 2),
    lambda x: torch.adaptive_max_pool1d(x[0], 2),
    lambda x: F.adaptive_max_pool1d_with_indices(x[0], 2),
    lambda x: F.lp_pool1d(x[0].abs() + 1, 2, 2),
    lambda x: F.interpolate(x[0], 3),
    lambda x: F.max_unpool1d(*F.max_pool1d(x[0], 2, return_indices=True), 2),
]
images("pool", POOL, T((3, 4, 6, 6), "d"))
images("pool_few", POOL, T((1, 4, 4, 4), "d"))
images("pool_none", POOL[:24], T((0, 4, 4, 4), "d"))
images(
    "pool3d",
    [
        lambda x: F.max_pool3d(x, 2),
        lambda x: torch.max_pool3d(x, 2),
        lambda x: F.max_pool3d_with_indices(x, 2),
        lambda x: F.avg_pool3d(x, 2),
        lambda x: F.adaptive_avg_pool3d(x, 2),
        lambda x: F.adaptive_max_pool3d(x, 2),
        lambda x: F.adaptive_max_pool3d_with_indices(x, 2),
        lambda x: F.lp_pool3d(x.abs() + 1, 2, 2),
        lambda x: F.max_unpool3d(*F.max_pool3d(x, 2, return_indices=True), 2),
    ],
    T((3, 2, 4, 4, 4), "d"),
)
images(
    "grid",
    [F.grid_sample, lambda x, g: F.grid_sample(x, g, "nearest", "border", True)],
    T((3, 2, 4, 4)),
    T((3, 2, 5, 2)),
)

# Normalisation.
CHANNELS = T((4,))
NORM = [
    lambda x, w, b: F.group_norm(x, 2, w, b),
    lambda x, w, b: F.group_norm(x, 4, weight=w),
    lambda x, w, b: F.group_norm(x, num_groups=1, bias=b, eps=0.1),
    lambda x, w, b: F.group_norm(x, 3, w, b),
    lambda x, w, b: F.group_norm(bias=b, weight=w, input=x, num_groups=2),
    lambda x, w, b: F.group_norm(x, 2, w, b, eps=0.0),
    lambda x, w, b: F.instance_norm(x, weight=w, bias=b, eps=0.0),
    lambda x, w, b: F.instance_norm(x),
    lambda x, w, b: F.instance_norm(x, weight=w, bias=b, eps=0.1),
    lambda x, w, b: F.instance_norm(x, w.detach() * 1, b.detach().abs() + 1),
    lambda x, w, b: F.instance_norm(x, w.detach(), b.detach().abs() + 1, use_input_stats=False),
    lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
    lambda x, w, b: F.batch_norm(x, None, None, training=True, eps=0.5),
    lambda x, w, b: F.batch_norm(x, w.detach(), b.detach().abs() + 1, w, b),
    lambda x, w, b: F.batch_norm(x, w.detach(), b.detach().abs() + 1, bias=b),
    lambda x, w, b: F.batch_norm(x[..., 0], None, None, w, b, training=True),
    lambda x, w, b: F.batch_norm(x.transpose(1, 2)[:, :, 0], None, None, training=True),
]
for tag, shape in (("", (3, 4, 5)), ("_one", (1, 4, 6)), ("_none", (0, 4, 5))):
    images(f"norm{tag}", NORM, T(shape), CHANNELS, CHANNELS)


def followed(x, mean, variance, **options):
    """The running statistics after some batches."""
    mean, variance = mean.detach() * 1, variance.detach().abs() + 1
    for part in (x, x * 2):
        F.batch_norm(part, mean, variance, training=True, **options)
    return mean, variance


each(
    "nn norm_running",
    [followed, lambda x, m, v: followed(x, m, v, momentum=0.5)],
    T((5, 4, 3)),
    T((4,), partial=False),
    T((4,), partial=False),
)


def followed_images(x, mean, variance, **options):
    """What instances give, and the running statistics after some batches."""
    mean, variance = mean.detach() * 1, variance.detach().abs() + 1
    found = [F.instance_norm(part, mean, variance, **options) for part in (x, x * 2)]
    return [*found, mean, variance]


IMAGES = [
    followed_images,
    lambda x, m, v: followed_images(x, m, v, momentum=0.5, weight=m, bias=v, eps=0.1),
    lambda x, m, v: followed_images(x, m, v, use_input_stats=False, weight=v),
    lambda x, m, v: followed_images(x[..., :1], m, v),
    lambda x, m, v: torch.instance_norm(
        x, m, v, m.detach() * 1, v.detach() ** 2, True, 0.2, 0.1, False
    ),
]
NATIVE = [
    lambda x, m, v: torch.batch_norm(
        x, m, v, m.detach() * 1, v.detach() ** 2, True, 0.2, 0.1, False
    ),
    lambda x, m, v: torch.native_layer_norm(x, (x.shape[-1],), None, None, 0.1),
    lambda x, m, v: torch.native_layer_norm(x.mT, (4,), m, v, 0.1),
    lambda x, m, v: torch.native_layer_norm(x.mT, (4,), m, None, 0.1),
    lambda x, m, v: torch.native_layer_norm(x, tuple(x.shape[1:]), None, None, 0.1),
    lambda x, m, v: torch.native_group_norm(x, m, v, x.shape[0], 4, x.shape[2], 2, 0.1),
    lambda x, m, v: torch.native_group_norm(x, None, None, x.shape[0], 4, x.shape[2], 4, 0.1)[0],
    lambda x, m, v: native(torch.native_batch_norm, x, m, v, True, 0.3, 0.1),
    lambda x, m, v: native(torch.native_batch_norm, x, m, v, False, 0.3, 0.1),
    lambda x, m, v: native(torch._native_batch_norm_legit, x, m, v, True, 0.3, 0.1),
    lambda x, m, v: torch._native_batch_norm_legit(x, m, v, True, 0.3, 0.1),
    lambda x, m, v: native(torch.ops.aten._batch_norm_with_update, x, m, v, 0.3, 0.1),
    lambda x, m, v: torch._softmax_backward_data(x, x * 2, 1, x.dtype),
    lambda x, m, v: torch._log_softmax_backward_data(x, x * 2, 0, x.dtype),
]


def native(function, x, mean, variance, *more):
    """Results, and the running statistics after the call."""
    running = mean.detach() * 1, variance.detach().abs() + 1
    return [*function(x, mean, variance, *running, *more), *running]


for tag, shape in (("", (5, 4, 3)), ("_few", (2, 4, 2)), ("_none", (0, 4, 3))):
    operands = (T(shape), T((4,), partial=False), T((4,), partial=False))
    images(f"norm_images{tag}", IMAGES, *operands)
    # Of no images, the derivative of torch's own batch norm ends the process.
    calls = NATIVE if shape[0] else NATIVE[:7]
    images(f"norm_native{tag}", calls, *operands)

# Losses of elements and of rows.
REDUCTIONS = ("mean", "sum", "none")
ELEMENTS = [
    lambda x, y, how=how, f=f: f(x, y, reduction=how)
    for how in REDUCTIONS
    for f in (
        F.mse_loss,
        F.l1_loss,
        F.smooth_l1_loss,
        F.huber_loss,
        F.poisson_nll_loss,
        F.soft_margin_loss,
        F.hinge_embedding_loss,
        lambda x, y, reduction: F.binary_cross_entropy(
            x.sigmoid(), y.sigmoid(), None, reduction=reduction
        ),
        F.binary_cross_entropy_with_logits,
        F.kl_div,
        lambda x, y, reduction: F.kl_div(x, y, log_target=True, reduction=reduction),
        lambda x, y, reduction: F.gaussian_nll_loss(
            x, y, y.detach().abs() + 1, reduction=reduction
        ),
        lambda x, y, reduction: F.gaussian_nll_loss(x, y, 0.5, reduction=reduction),
        lambda x, y, reduction: F.triplet_margin_loss(x, y, x * y, reduction=reduction),
        lambda x, y, reduction: F.multilabel_soft_margin_loss(x, y, reduction=reduction),
        lambda x, y, reduction: F.margin_ranking_loss(
            x, y, x.detach().sign(), 0.5, reduction=reduction
        ),
    )
]
MORE_LOSSES = [
    lambda x, y: F.mse_loss(target=y, input=x),
    lambda x, y: F.mse_loss(x, y, False),
    lambda x, y: F.mse_loss(x, y, reduction="wrong"),
    lambda x, y: F.kl_div(x, y, reduction="batchmean"),
    lambda x, y: F.smooth_l1_loss(x, y, beta=0.3),
    lambda x, y: F.huber_loss(x, y, delta=0.3),
    lambda x, y: F.mse_loss(x, y, reduction="sum", weight=y.detach().abs()),
    lambda x, y: F.binary_cross_entropy_with_logits(x, y, pos_weight=y.detach().abs()),
    *(
        lambda x, y, f=f, how=how: f(x, y, reduction=how, weight=y.abs() + 1)
        for f in (F.mse_loss, F.l1_loss, F.huber_loss)
        for how in (*REDUCTIONS, "wrong")
    ),
    lambda x, y: F.l1_loss(x, y, None, None, "mean", y * x),
    lambda x, y: F.l1_loss(x, y, weight=y[0]),
    lambda x, y: F.mse_loss(x, y, reduce=False),
    lambda x, y: F.mse_loss(x, y, size_average=False),
    lambda x, y: F.l1_loss(x, y, size_average=True),
    lambda x, y: F.triplet_margin_with_distance_loss(x, y, x * y),
    lambda x, y: F.triplet_margin_with_distance_loss(x, y, x - y, swap=True, reduction="none"),
    lambda x, y: F.triplet_margin_with_distance_loss(
        x, y, x * 2, distance_function=lambda a, b: (a - b).abs().amax(1), reduction="sum"
    ),
    lambda x, y: F.triplet_margin_with_distance_loss(x, y, x, margin=0),
    lambda x, y: F.cosine_embedding_loss(x[0], y[0], y[0, 0].detach().sign()),
    lambda x, y: F.mse_loss(x[:0], y[:0]),
    lambda x, y: F.l1_loss(x.sum(), y.sum()),
]
# Variances of whole rows: their one column has no place in memory that would be known.
VARIANCES = [
    *(
        lambda x, y, how=how, of=of: F.gaussian_nll_loss(x, y, of(x) ** 2 + 1, reduction=how)
        for how in REDUCTIONS
        for of in (lambda x: x[:, 0], lambda x: x[:, :1], lambda x: x[:1], lambda x: x)
    ),
    lambda x, y: F.gaussian_nll_loss(x, y, x[:2].abs()),
]
each("nn loss", ELEMENTS, T((5, 4)), T((5, 4)))
each("nn loss_few", ELEMENTS, T((2, 3)), T((2, 3)))
each("nn loss_deep", ELEMENTS[:16], T((2, 3, 5)), T((2, 3, 5)))
each("nn loss_more", MORE_LOSSES, T((5, 4)), T((5, 4)))
images("loss_variance", VARIANCES, T((5, 4)), T((5, 4)))
images("loss_variance_few", VARIANCES, T((2, 3)), T((2, 3)))
each(
    "nn loss_broadcast",
    [F.mse_loss, F.smooth_l1_loss, lambda x, y: F.poisson_nll_loss(x, y, reduction="none")],
    T((5, 4)),
    T((1, 4)),
)
each(
    "nn loss_weights",
    [
        lambda x, y, w: F.binary_cross_entropy_with_logits(x, y, w, pos_weight=w),
        lambda x, y, w: F.binary_cross_entropy_with_logits(x, y, pos_weight=w, reduction="sum"),
        lambda x, y, w: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), w),
        lambda x, y, w: F.mse_loss(x, y, weight=w.expand(5, 4)),
    ],
    T((5, 4)),
    T((5, 4)),
    T((4,), "p", grad=False),
)
images(
    "bilinear",
    [
        F.bilinear,
        lambda x, y, w: F.bilinear(x, y, w, w[:, 0, 0] * 1),
        lambda x, y, w: F.bilinear(x[0], y[0], w, bias=w[:, 1, 1]),
        lambda x, y, w: F.bilinear(x[None], y[None], w),
        lambda x, y, w: F.bilinear(x, x, w),
    ],
    T((5, 3)),
    T((5, 4)),
    T((2, 3, 4)),
)
ALIGNED = [
    lambda x, t, n, how=how, clean=clean: F.ctc_loss(
        x.log_softmax(2), t, n + 4, n, reduction=how, zero_infinity=clean
    )
    for how in (*REDUCTIONS, "wrong")
    for clean in (False, True)
]
ALIGNED += [
    lambda x, t, n: F.ctc_loss(x.log_softmax(2), t, n * 0 + 7, n * 0, 3),
    lambda x, t, n: F.ctc_loss(x.log_softmax(2), t, [7] * len(n), [2] * len(n)),
    lambda x, t, n: F.ctc_loss(x.log_softmax(2), t, n + 40, n),
]
for tag, count in (("", 5), ("_few", 2)):
    images(
        f"ctc{tag}",
        ALIGNED,
        T((7, count, 4)),
        T((count, 3), "i", high=4, low=1, partial=False),
        T((count,), "i", high=4, low=1, partial=False),
        data=True,
    )

if hasattr(F, "linear_cross_entropy"):
    each(
        "nn loss_linear",
        [
            F.linear_cross_entropy,
            lambda x, w, t: F.linear_cross_entropy(x, w, t, linear_bias=w[:, 0] * 1),
            lambda x, w, t: F.linear_cross_entropy(x, w, t, reduction="none", ignore_index=1),
            lambda x, w, t: F.linear_cross_entropy(x, w, t, label_smoothing=0.2),
            lambda x, w, t: F.linear_cross_entropy(x, w, t, weight=w[:, 0].detach().abs()),
            lambda x, w, t: F.linear_cross_entropy(x, w, x @ w.t()),
            lambda x, w, t: F.linear_cross_entropy(x[0], w, t[0]),
            lambda x, w, t: F.linear_cross_entropy(x, w[:, None], t[:, None]),
            lambda x, w, t: F.linear_cross_entropy(x[:, :2], w, t),
        ],
        T((5, 4)),
        T((6, 4)),
        T((5,), "i", high=6, partial=False),
    )
each(
    "nn loss_labels",
    [
        F.multi_margin_loss,
        lambda x, t: F.multi_margin_loss(x, t, 2, 0.5, reduction="none"),
        lambda x, t: F.cosine_embedding_loss(x, x.flip(0) * 2, (t % 2) * 2 - 1, 0.1),
        lambda x, t: F.multilabel_margin_loss(x, t[:, None].expand(5, 4).contiguous()),
        lambda x, t: F.nll_loss(x, t),
        lambda x, t: F.nll_loss(x, t, reduction="none"),
        lambda x, t: F.nll_loss(x, t, x.detach()[0].abs(), reduction="sum", ignore_index=1),
    ],
    T((5, 4)),
    T((5,), "i", high=4, partial=False),
)

# Along one dim.
images(
    "along",
    [
        F.glu,
        lambda x: F.glu(x, 0),
        lambda x: F.glu(x, dim=2),
        F.normalize,
        lambda x: F.normalize(x, 1, 0),
        lambda x: F.normalize(x, dim=-1, p=3),
        lambda x: F.cosine_similarity(x, x * 2 + 1),
        lambda x: F.cosine_similarity(x, x[0] + 1, dim=-1),
        lambda x: F.pairwise_distance(x, x + 2),
        lambda x: F.pairwise_distance(x, x[:1] + 1, 1, keepdim=True),
        lambda x: torch.cdist(x, x[:, :2] + 1),
        lambda x: torch.cdist(x[0], x[1] + 3, p=1),
        lambda x: F.prelu(x, torch.tensor([0.3], dtype=torch.float64)),
        lambda x: F.prelu(x, x[0, :, 0].detach().abs()),
        lambda x: F.prelu(x[0, 0], x[0, 0, 0]),
    ],
    T((4, 6, 4)),
)
each(
    "nn one_hot",
    [lambda t: F.one_hot(t, 5), lambda t: F.one_hot(t), lambda t: F.one_hot(t, num_classes=7)],
    T((5, 3), "i", high=5, partial=False),
    exact=True,
)
images(
    "grouped",
    [
        lambda a, b: torch._grouped_mm(
            a.bfloat16(), b.bfloat16(), offs=torch.tensor([3, 3, 8], dtype=torch.int32)
        )
    ],
    T((8, 16)),
    T((3, 16, 24)),
    ordered=False,  # torch refuses matrices of most strides
)
