"""The curves as a picture."""

from collections.abc import Mapping
from pathlib import Path

from vescale_parallel import TrainError

from tools.compare.findings import EARLY_BOUND, EARLY_STEPS


def draw_curves(
    path: Path, reference: Mapping[int, float], others: Mapping[str, Mapping[int, float]]
) -> None:
    """Write a PNG: losses above, relative differences to one device below.

    Raises:
        TrainError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise TrainError("the picture needs matplotlib: pip install matplotlib") from error
    # Without pyplot there is no backend to choose and no global figure to close.
    figure = Figure(figsize=(9, 7), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    above.plot(list(reference), list(reference.values()), color="0.7", lw=5, label="one device")
    for title, curve in others.items():
        above.plot(list(curve), list(curve.values()), lw=1.2, label=title)
        # A log axis has no place for an exact zero; half of float32's resolution stands for it.
        gaps = [max(abs(curve[s] - reference[s]) / reference[s], 3e-8) for s in curve]
        below.plot(list(curve), gaps, lw=1.2)
    below.hlines(EARLY_BOUND, 1, EARLY_STEPS, color="red", ls="--", label="promised")
    below.set(yscale="log", ylabel="relative difference", xlabel="step")
    above.set(ylabel="loss (nats per byte)", title="The same curve on every mesh")
    above.legend()
    below.legend()
    figure.savefig(path, dpi=120)
