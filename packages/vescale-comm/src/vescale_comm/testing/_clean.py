"""Restores the clean state of a worker that a case has changed, before the next case."""

import gc
import locale
import os
import random
import sys
import tempfile
from collections.abc import Callable

import numpy
import torch

from vescale_comm._watchdog.current_watcher import forget_executed


def cleaner() -> Callable[[], None]:
    """Remember the environment as it is now; return what restores a clean state."""
    environ = dict(os.environ)
    # Of the process: what files are read as by default, and when Python collects and switches.
    language, thresholds = locale.setlocale(locale.LC_ALL), gc.get_threshold()
    interval, folder = sys.getswitchinterval(), tempfile.tempdir

    def _clean() -> None:
        # Compared first: each write calls putenv, and few cases change it.
        if dict(os.environ) != environ:
            os.environ.clear()
            os.environ.update(environ)
        locale.setlocale(locale.LC_ALL, language)
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(interval)
        tempfile.tempdir = folder
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
