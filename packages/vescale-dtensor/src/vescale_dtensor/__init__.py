"""One tensor over many devices, with the semantics of one device."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# First of all: the modules that the class needs import it in turn.
import vescale_dtensor._tensor  # noqa: F401
from vescale_dtensor._capture import Captured, Program, capture
from vescale_dtensor._convert import distribute_tensor
from vescale_dtensor._dispatch import register_rule
from vescale_dtensor._errors import (
    CaptureError,
    DisagreementError,
    DTensorError,
    LayoutError,
    MeshError,
    StrictError,
    UnsupportedError,
)
from vescale_dtensor._explain import Explanation, explain
from vescale_dtensor._factories import arange, empty, full, ones, rand, randint, randn, zeros
from vescale_dtensor._factories_random import normal, randperm
from vescale_dtensor._leaf import PendingGradient
from vescale_dtensor._local_map import local_map
from vescale_dtensor._modules import distribute_module
from vescale_dtensor._placements import (
    InterleavedShard,
    Partial,
    Placement,
    RaggedShard,
    Replicate,
    Shard,
    StridedShard,
)
from vescale_dtensor._rules import install as _install_rules
from vescale_dtensor._strict import strict
from vescale_dtensor._support import op_support
from vescale_dtensor._tensor import DTensor
from vescale_dtensor._totals import gradient_total, set_gradient_reducer
from vescale_dtensor._version import __version__
from vescale_dtensor._visualize import visualize

_install_rules()

__all__ = [
    "CaptureError",
    "Captured",
    "DTensor",
    "DTensorError",
    "DeviceMesh",
    "DisagreementError",
    "Explanation",
    "InterleavedShard",
    "LayoutError",
    "MeshError",
    "Partial",
    "PendingGradient",
    "Placement",
    "Program",
    "RaggedShard",
    "Replicate",
    "Shard",
    "StrictError",
    "StridedShard",
    "UnsupportedError",
    "__version__",
    "arange",
    "capture",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "explain",
    "full",
    "gradient_total",
    "init_device_mesh",
    "local_map",
    "normal",
    "ones",
    "op_support",
    "rand",
    "randint",
    "randn",
    "randperm",
    "register_rule",
    "set_gradient_reducer",
    "strict",
    "visualize",
    "zeros",
]
