"""What one case may leave behind in a worker, and how it is undone before the next."""

import os
import random
from collections.abc import Callable

import numpy
import torch

from vescale_comm._watchdog.current import forget_executed


def cleaner() -> Callable[[], None]:
    """Remember the environment as it is now; return what restores a clean state."""
    environ = dict(os.environ)

    def _clean() -> None:
        # Compared first: each write calls putenv, and few cases change it.
        if dict(os.environ) != environ:
            os.environ.clear()
            os.environ.update(environ)
        forget_executed()
        random.seed(0)
        numpy.random.seed(0)
        torch.manual_seed(0)
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.set_num_threads(1)
        if torch.are_deterministic_algorithms_enabled():  # telling imports inductor, asking is free
            torch.use_deterministic_algorithms(False)

    return _clean
