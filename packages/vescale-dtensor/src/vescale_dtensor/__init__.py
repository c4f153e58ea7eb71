"""One tensor over many devices, with the semantics of one device."""

from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor import _torch_versions as _torch_versions
from vescale_dtensor._api.distribute_module import distribute_module
from vescale_dtensor._api.factories import arange, empty, full, ones, rand, randint, randn, zeros
from vescale_dtensor._api.factories_random import normal, randperm
from vescale_dtensor._api.init_mesh import init_device_mesh
from vescale_dtensor._api.linspace import linspace, logspace
from vescale_dtensor._api.local_map import local_map
from vescale_dtensor._api.methods import install as _install_methods
from vescale_dtensor._autograd.conversion import distribute_tensor
from vescale_dtensor._autograd.gradient_reducer import gradient_total
from vescale_dtensor._capture import Captured, Program, ReplayCheck, capture, checkpoint
from vescale_dtensor._errors import (
    CaptureError,
    DisagreementError,
    DTensorError,
    LayoutError,
    MeshError,
    StrictError,
    UnsupportedError,
)
from vescale_dtensor._inspect.explain import explain
from vescale_dtensor._inspect.op_support import op_support
from vescale_dtensor._inspect.strict import strict
from vescale_dtensor._inspect.visualize import visualize
from vescale_dtensor._joint import Joint, joint
from vescale_dtensor._layout.placement_base import Placement
from vescale_dtensor._layout.placements import (
    InterleavedShard,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
)
from vescale_dtensor._ops.families import install as _install_rules
from vescale_dtensor._planning.attention_way import (
    AttentionWay,
    attention_way,
    sequence_attention,
)
from vescale_dtensor._redistribute.half_sums import half_sums
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._torch.untraced import untraced
from vescale_dtensor._version import __version__
from vescale_dtensor.rules._registration import register_rule

_install_methods()
_install_rules()

__all__ = [
    "AttentionWay",
    "CaptureError",
    "Captured",
    "DTensor",
    "DTensorError",
    "DeviceMesh",
    "DisagreementError",
    "InterleavedShard",
    "Joint",
    "LayoutError",
    "MeshError",
    "Partial",
    "Placement",
    "Program",
    "RaggedShard",
    "ReplayCheck",
    "Replicate",
    "Shard",
    "StrictError",
    "UnsupportedError",
    "__version__",
    "arange",
    "attention_way",
    "capture",
    "checkpoint",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "explain",
    "full",
    "gradient_total",
    "half_sums",
    "init_device_mesh",
    "joint",
    "linspace",
    "local_map",
    "logspace",
    "normal",
    "ones",
    "op_support",
    "rand",
    "randint",
    "randn",
    "randperm",
    "register_rule",
    "sequence_attention",
    "strict",
    "untraced",
    "visualize",
    "zeros",
]
