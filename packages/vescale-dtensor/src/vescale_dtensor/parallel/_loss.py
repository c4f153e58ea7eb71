"""`loss_parallel`: losses of logits that are sharded along the classes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Compute cross-entropy of logits that are sharded along the classes, without gathering them.

    The signature is that of `torch.distributed.tensor.parallel.loss_parallel`. Inside and outside
    of it, `torch.nn.functional.cross_entropy`, `nll_loss`, `log_softmax` and the like of such
    logits send a few numbers for each row, forward, and nothing, backward: the rules of these
    functions say so, and there is nothing to switch on. Programs that were written for torch keep
    the block; here `backward()` need not be inside, targets may lie in any layout, and there may be
    weights, label smoothing and meshes with several axes.

    Examples:
        with loss_parallel():
            F.cross_entropy(logits, targets).backward()
    """
    yield
