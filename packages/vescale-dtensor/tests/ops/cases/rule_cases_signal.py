"""Cases: signals, segments, slopes, and calls whose numbers are tensors."""

from __future__ import annotations

import torch
from rule_fuzz import T
from rule_table import A, E, add, each

WAVES, WINDOW = T((3, 20)), T((8,), "p")
SIGNALS = [
    lambda x, w: torch.stft(x, 8, return_complex=True),
    lambda x, w: torch.stft(x, 8, 2, window=w, return_complex=True).abs(),
    lambda x, w: x.stft(8, hop_length=4, window=w, center=False, return_complex=True),
    lambda x, w: torch.stft(x, 8, window=w, onesided=False, return_complex=True).real,
    lambda x, w: torch.istft(torch.stft(x, 8, 2, window=w, return_complex=True), 8, 2, window=w),
    lambda x, w: torch.stft(x, 8, return_complex=True).istft(8, length=18),
]
each("signals", SIGNALS, WAVES, WINDOW, ordered=False)
each("signal", SIGNALS, T((20,)), WINDOW, ordered=False)
each("signals_uneven", SIGNALS[:2], T((5, 16)), WINDOW, ordered=False)

SEGMENTS = [
    lambda x: torch.segment_reduce(x, "sum", lengths=torch.tensor([2, 0, 3]), axis=0),
    lambda x: torch.segment_reduce(x, "mean", offsets=torch.tensor([0, 1, 5]), axis=0),
    lambda x: torch.segment_reduce(x, "max", lengths=torch.tensor([4, 1]), unsafe=True),
    lambda x: torch.segment_reduce(x, "min", lengths=torch.tensor([[1, 3]] * 5), axis=1),
    lambda x: torch.segment_reduce(x, "prod", lengths=torch.tensor([5, 0]), initial=2.0),
]
each("segments", SEGMENTS, A, ordered=False)
SLOPES = [
    lambda x: torch.gradient(x),
    lambda x: torch.gradient(x, spacing=2.0, dim=0),
    lambda x: torch.gradient(x, dim=(0, -1), edge_order=2),
    lambda x: torch.gradient(x, spacing=(torch.arange(5.0).double() ** 2,), dim=1),
    lambda x: torch.gradient(x, spacing=[1.0, 0.5], dim=(2, 0)),
]
each("slopes", SLOPES, T((3, 5, 4)))
each("slopes_row", SLOPES[:2], T((6,)))

PLACES = T((), "i", high=3)
each(
    "numbers_given",
    [
        lambda x, n: x.narrow(0, n, 2),
        lambda x, n: torch.narrow(x, 1, n, 1) * 2,
        lambda x, n: x.tensor_split(n + 1),
        lambda x, n: x.tensor_split(n.reshape(1), dim=1),
        lambda x, n: torch.linspace(n, n + 4, 5, dtype=x.dtype) * x[:, 0],
        lambda x, n: torch.logspace(0, n, 3) + 0 * x[0, 0],
        lambda x, n: x.inner(n.double()) + torch.inner(n.double(), x),
        lambda x, n: torch.repeat_interleave(x, n, 0),
    ],
    A,
    PLACES,
)
OFTEN = T((5,), "i", high=3)
each(
    "repeated_each",
    [
        lambda x, n: torch.repeat_interleave(x, n, dim=0),
        lambda x, n: x.repeat_interleave(n, 0),
        lambda x, n: torch.repeat_interleave(n),
        lambda x, n: x.repeat_interleave(2),
        lambda x, n: x.repeat_interleave(n[:4], -1),
        lambda x, n: x[:, 0].repeat_interleave(n),
    ],
    A,
    OFTEN,
)
each(
    "three_long",
    [
        lambda x, y: torch.cross(x, y),
        lambda x, y: x.cross(y, dim=-1),
        lambda x, y: torch.linalg.cross(x, y[:1]),
        lambda x, y: torch.tensordot(x, y[:1], ([0, 1], [0, 1])),
        lambda x, y: torch.trapezoid(x, y[:1]),
        lambda x, y: torch.cumulative_trapezoid(x, y.cumsum(1)),
        lambda x, y: torch.trapezoid(x, y[:, 0], dim=0),
        lambda x, y: torch.rot90(x) + 0 * y.sum(),
        lambda x, y: torch._chunk_cat([x, y[:, :2]], 0, 2),
        lambda x, y: torch._chunk_cat([x, y], 1, 2),
    ],
    T((6, 3)),
    T((6, 3)),
)
add("three_first", lambda x, y: torch.cross(x, y), E, E)
each(
    "weighed",
    [
        lambda x, f, a: torch.cov(x, fweights=f),
        lambda x, f, a: torch.cov(x, aweights=a, correction=0),
        lambda x, f, a: x.cov(fweights=f, aweights=a),
        lambda x, f, a: torch.cov(x[0], aweights=a),
        lambda x, f, a: torch.cov(x, fweights=f - 9),
        lambda x, f, a: torch.corrcoef(x) * a[0],
    ],
    T((3, 4), "d"),
    T((4,), "i", low=1),
    T((4,), "p"),
)
SOLVED = [
    lambda a, b: torch.linalg.lstsq(a.detach(), b.detach()),
    lambda a, b: torch.linalg.lstsq(a, b, driver="gels")[0],
    lambda a, b: torch.linalg.lstsq(a.mT.detach(), b[:, :4].detach(), driver="gelsd")[0],
    lambda a, b: torch.linalg.lstsq(a.detach(), b.detach(), driver="gels").residuals,
    lambda a, b: torch.linalg.matrix_rank(a.detach(), atol=b.detach()[:, 0, 0].abs() / 9),
    lambda a, b: torch.lu(a.detach()[:, :4]),
    lambda a, b: torch.lu(a[:, :4] + 40 * torch.eye(4, dtype=a.dtype), get_infos=True),
]
each("solved_least", SOLVED, T((3, 5, 4), "d"), T((3, 5, 2)))
add(
    "solved_tensor",
    lambda a, b: torch.linalg.tensorsolve(a + 40 * torch.eye(6, dtype=a.dtype).view(2, 3, 6), b),
    T((2, 3, 6)),
    T((2, 3)),
)
each(
    "of_aten",
    [
        lambda x, y: torch.ops.aten.slice.Tensor(x, 0, 1, 4, 2) * 2,
        lambda x, y: torch.ops.aten.slice(x, -1, 1),
        lambda x, y: torch.ops.aten.native_dropout_backward(x, y > 0, 2.0),
        lambda x, y: torch.ops.aten._safe_softmax(torch.where(y > 0, x, -torch.inf), 1),
        lambda x, y: torch.ops.aten._softmax_backward_data(x, y.softmax(0), 0, x.dtype),
        lambda x, y: torch.ops.aten._softmax_backward_data.default(x, y.softmax(1), 1, x.dtype),
        lambda x, y: torch.ops.aten._log_softmax_backward_data(x, y.log_softmax(0), 0, x.dtype),
        lambda x, y: torch.ops.aten._log_softmax_backward_data.default(
            x, y.log_softmax(1), -1, x.dtype
        ),
        lambda x, y: torch.ops.aten.slice.Tensor(x, 1, -2) + y[:, :2],
        lambda x, y: torch.ops.aten.native_dropout_backward.default(x, y > 0, 0.5),
        lambda x, y: torch.ops.aten._safe_softmax.default(x, 0) * y,
    ],
    A,
    A,
)
each(
    "of_aten_resized",
    [
        lambda x: torch.ops.aten._upsample_bilinear2d_aa(x, [3, 7], False),
        lambda x: torch.ops.aten._upsample_bilinear2d_aa.default(x, [7, 2], True),
    ],
    T((3, 2, 5, 4)),
    strides=False,
)
each(
    "of_aten_sampled",
    [
        lambda x, g: torch.grid_sampler(x, g / 2, 0, 0, False),
        lambda x, g: torch.grid_sampler_2d(x, g / 2, 1, 1, True),
        lambda x, g: torch.grid_sampler_3d(x.unsqueeze(2), _deep(g), 0, 0, False),
    ],
    T((3, 2, 5, 4)),
    T((3, 2, 3, 2)),
    strides=False,
)


def _deep(grid):
    """Places in one layer of an image."""
    return torch.nn.functional.pad(grid / 2, (0, 1)).unsqueeze(1)


COUNTED = [
    lambda x, w: torch.histogram(x.detach(), 4),
    lambda x, w: x.detach().histogram(5, range=(-1.0, 1.5)),
    lambda x, w: torch.histogram(x.detach(), 3, weight=w.detach()),
    lambda x, w: torch.histogram(x.detach(), torch.tensor([-1.0, 0.0, 0.5, 2.0]).double()),
    lambda x, w: torch.histogram(x.detach(), 4, density=True),
    lambda x, w: torch.histogram(x.detach() * 0, 4, weight=w.detach()),
    lambda x, w: torch.histogram(torch.where(x.detach() > 1.5, torch.nan, x.detach()), 4),
]
each("histograms", COUNTED, A, A)
each("histograms_row", COUNTED[:4], T((3,)), T((3,)))
each("histograms_empty", COUNTED[:4], T((0, 3)), T((0, 3)))
add("all_true", lambda x: torch._is_all_true(x), T((5, 4), "b"), exact=True)
