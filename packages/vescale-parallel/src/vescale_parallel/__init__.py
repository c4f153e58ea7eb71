"""A plan turns a model into its parallel self, and a trainer runs it."""

from vescale_parallel._errors import (
    DisagreementError,
    MeshError,
    ParallelError,
    PlanError,
    TrainError,
)
from vescale_parallel._mesh import mesh
from vescale_parallel._parallelize import parallelize
from vescale_parallel._plan import Plan
from vescale_parallel._report import BoundaryRow, ParameterRow, Report
from vescale_parallel._version import __version__

__all__ = [
    "BoundaryRow",
    "DisagreementError",
    "MeshError",
    "ParallelError",
    "ParameterRow",
    "Plan",
    "PlanError",
    "Report",
    "TrainError",
    "__version__",
    "mesh",
    "parallelize",
]
