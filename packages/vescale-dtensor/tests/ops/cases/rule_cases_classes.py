"""Cases: losses of rows whose classes may be cut, with weights, smoothing and shares of classes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from rule_fuzz import T
from rule_table import each

REDUCTIONS = ("mean", "sum", "none")


def options():
    """Every reduction, with and without smoothing."""
    return [
        {"reduction": how, "label_smoothing": smoothing}
        for how in REDUCTIONS
        for smoothing in (0.0, 0.3)
    ]


def single(x, t, w):
    """A loss of numbers of single precision, and its gradient."""
    x = x.detach().float().requires_grad_()
    loss = F.cross_entropy(x, t, w, label_smoothing=0.1)
    loss.sum().backward()
    return loss.detach(), x.grad


INDEX = [lambda x, t, w, o=o: F.cross_entropy(x, t, w, **o) for o in options()]
INDEX += [lambda x, t, w, o=o: F.cross_entropy(x, t, w, ignore_index=1, **o) for o in options()]
INDEX += [
    lambda x, t, w: F.cross_entropy(x, t.where(t > 0, -7), w, ignore_index=-7),
    lambda x, t, w: F.cross_entropy(x, t * 0 - 100, w, label_smoothing=0.2),
    lambda x, t, w: F.cross_entropy(x * 300, t, w, label_smoothing=0.2),
    lambda x, t, w: F.cross_entropy(x, t.to(torch.uint8), w),
    lambda x, t, w: F.cross_entropy(x, t.int(), w),
    lambda x, t, w: F.cross_entropy(x, t, w.float()),
    lambda x, t, w: F.cross_entropy(x, t, w * x.flatten()[0]),
    lambda x, t, w: F.cross_entropy(x, t, w, label_smoothing=1.5),
    lambda x, t, w: F.cross_entropy(x, t, label_smoothing=0.1),
    lambda x, t, w: F.cross_entropy(x, t, label_smoothing=1.0),
    lambda x, t, w: single(x, t, w.float()),
    lambda x, t, w: F.cross_entropy(x, t, w, reduce=False),
]
LIKELIHOOD = [lambda x, t, w, how=how: F.nll_loss(x, t, w, reduction=how) for how in REDUCTIONS]
LIKELIHOOD += [
    lambda x, t, w: F.nll_loss(x, t, ignore_index=1),
    lambda x, t, w: F.nll_loss(x, t, w, ignore_index=1),
    lambda x, t, w: F.nll_loss(x, t, reduction="wrong"),
    lambda x, t, w: F.nll_loss(input=x, target=t, weight=w),
    lambda x, t, w: F.nll_loss(x, t * 0 + 1, ignore_index=1),
    lambda x, t, w: F.nll_loss(x, t.where(t > 0, -100), w),
    lambda x, t, w: F.nll_loss(F.log_softmax(x, min(1, x.ndim - 1)), t, w),
]
SHAPES = {
    "even": (8, 8),
    "uneven": (5, 7),
    "few": (2, 3),
    "one": (1, 1),
    "none": (0, 6),
    "image": (3, 6, 2, 2),
    "thin": (2, 5, 0),
    "row": (6,),
}
for tag, shape in SHAPES.items():
    rows = shape[:1] + shape[2:] if len(shape) > 1 else ()
    classes = shape[min(1, len(shape) - 1)]
    operands = (T(shape), T(rows, "i", high=classes, partial=False), T((classes,), "p", grad=False))
    each(f"classes index_{tag}", INDEX, *operands, data=True, strides=False)
    each(f"classes likelihood_{tag}", LIKELIHOOD, *operands, data=True, strides=False)

SHARES = [lambda x, t, w, o=o: F.cross_entropy(x, t, w, **o) for o in options()]
SHARES += [lambda x, t, w, o=o: F.cross_entropy(x, t, **o) for o in options()]
SHARES += [
    lambda x, t, w: F.cross_entropy(x * 300, t, w),
    lambda x, t, w: F.cross_entropy(x, t, ignore_index=2),
    lambda x, t, w: single(x, t.detach().float(), w.detach().float()),
    lambda x, t, w: F.cross_entropy(x, t.softmax(min(1, x.ndim - 1)), w),
    lambda x, t, w: F.nll_loss(x, t),
]
for tag, shape in (*SHAPES.items(), ("empty", (3, 0))):
    classes = shape[min(1, len(shape) - 1)]
    operands = (T(shape), T(shape, "p"), T((classes,), "p"))
    each(f"classes shares_{tag}", SHARES, *operands, strides=False)


def slope_of_slope(x, t, w):
    """The derivative along a direction of the gradient of a loss."""
    loss = F.cross_entropy(x * 1, t, w.detach() if t.ndim < x.ndim else w, label_smoothing=0.2)
    if not x.requires_grad:
        return loss
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return (slope * slope).sum()


for tag in ("even", "uneven", "few", "image"):
    shape = SHAPES[tag]
    rows = T(shape[:1] + shape[2:], "i", high=shape[1], partial=False)
    for kind, target in (("index", rows), ("shares", T(shape, "p"))):
        operands = (T(shape), target, T(shape[1:2]))
        each(f"classes twice_{kind}_{tag}", [slope_of_slope], *operands)
