"""Constants that maps need, computed on the host without its libm, so that all hosts agree."""

import numpy as np

from vescale_rng._portable.functions import DOUBLE, minus_log
from vescale_rng._portable.numpy_arrays import NumpyArrays


def minus_log1p_of_minus(p: float) -> float:
    """Return -log(1 - p) for 0 < p < 1, in float64."""
    if p < 2.0**-10:
        # 1 - p would lose p's digits; four terms more than suffice.
        return p * (1 + p * (1 / 2 + p * (1 / 3 + p * (1 / 4 + p * (1 / 5 + p / 6)))))
    return float(minus_log(NumpyArrays(), DOUBLE, np.array([1.0 - p]))[0])
