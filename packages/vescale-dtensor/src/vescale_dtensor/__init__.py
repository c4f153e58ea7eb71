"""One tensor over many devices, with the semantics of one device."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# First of all: the modules that the class needs import it in turn.
import vescale_dtensor._tensor  # noqa: F401
from vescale_dtensor._convert import distribute_tensor
from vescale_dtensor._dispatch import register_rule
from vescale_dtensor._errors import DTensorError, LayoutError, MeshError, UnsupportedError
from vescale_dtensor._gradients import gradient_total, set_gradient_reducer
from vescale_dtensor._leaf import PendingGradient
from vescale_dtensor._placements import Partial, Placement, RaggedShard, Replicate, Shard
from vescale_dtensor._rules import install as _install_rules
from vescale_dtensor._tensor import DTensor
from vescale_dtensor._version import __version__

_install_rules()

__all__ = [
    "DTensor",
    "DTensorError",
    "DeviceMesh",
    "LayoutError",
    "MeshError",
    "Partial",
    "PendingGradient",
    "Placement",
    "RaggedShard",
    "Replicate",
    "Shard",
    "UnsupportedError",
    "__version__",
    "distribute_tensor",
    "gradient_total",
    "init_device_mesh",
    "register_rule",
    "set_gradient_reducer",
]
