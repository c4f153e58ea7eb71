"""One tensor over many devices, with the semantics of one device."""

from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor import _torch_versions as _torch_versions
from vescale_dtensor._api.distribute_module import distribute_module
from vescale_dtensor._api.factories import arange, empty, full, ones, rand, randint, randn, zeros
from vescale_dtensor._api.factories_random import normal, randperm
from vescale_dtensor._api.init_mesh import init_device_mesh
from vescale_dtensor._api.local_map import local_map
from vescale_dtensor._api.methods import install as _install_methods
from vescale_dtensor._api.spaced import linspace, logspace
from vescale_dtensor._api.sum_whole import sum_whole
from vescale_dtensor._autograd.conversion import distribute_tensor
from vescale_dtensor._autograd.gathered import (
    Gathering,
    before_backward,
    gathered,
    keep_alive,
    local_leaf,
    local_leaves,
    written_unseen,
)
from vescale_dtensor._autograd.gradient_reducer import (
    gradient_total,
    reduce_gradients,
    set_gradient_reducer,
)
from vescale_dtensor._autograd.kept_gradient import (
    GradientKeeper,
    keep_gradient,
    release_kept_gradient,
)
from vescale_dtensor._autograd.leaf_gradient import PendingGradient
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
from vescale_dtensor._inspect.explain import Explanation, explain
from vescale_dtensor._inspect.op_support import op_support
from vescale_dtensor._inspect.strict import strict
from vescale_dtensor._inspect.torch_layouts import layout_differences
from vescale_dtensor._inspect.visualize import visualize
from vescale_dtensor._joint import Joint, ParameterStorage, StoredSlice, joint, joint_stored
from vescale_dtensor._layout.placement_base import Placement
from vescale_dtensor._layout.placements import (
    InterleavedShard,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    StridedShard,
)
from vescale_dtensor._ops.families import install as _install_rules
from vescale_dtensor._ops.tensor.memory_identity import memories_of, separate_memory
from vescale_dtensor._planning.attention_way import (
    AttentionWay,
    attention_way,
    sequence_attention,
)
from vescale_dtensor._redistribute.half_sums import half_sums
from vescale_dtensor._tensor.copied_views import permit_writes, refuse_writes
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._tensor.lineage import note_written
from vescale_dtensor._tensor.observers import watch_operands
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
    "Explanation",
    "Gathering",
    "GradientKeeper",
    "InterleavedShard",
    "Joint",
    "LayoutError",
    "MeshError",
    "ParameterStorage",
    "Partial",
    "PendingGradient",
    "Placement",
    "Program",
    "RaggedShard",
    "ReplayCheck",
    "Replicate",
    "Shard",
    "StoredSlice",
    "StrictError",
    "StridedShard",
    "UnsupportedError",
    "__version__",
    "arange",
    "attention_way",
    "before_backward",
    "capture",
    "checkpoint",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "explain",
    "full",
    "gathered",
    "gradient_total",
    "half_sums",
    "init_device_mesh",
    "joint",
    "joint_stored",
    "keep_alive",
    "keep_gradient",
    "layout_differences",
    "linspace",
    "local_leaf",
    "local_leaves",
    "local_map",
    "logspace",
    "memories_of",
    "normal",
    "note_written",
    "ones",
    "op_support",
    "permit_writes",
    "rand",
    "randint",
    "randn",
    "randperm",
    "reduce_gradients",
    "refuse_writes",
    "register_rule",
    "release_kept_gradient",
    "separate_memory",
    "sequence_attention",
    "set_gradient_reducer",
    "strict",
    "sum_whole",
    "untraced",
    "visualize",
    "watch_operands",
    "written_unseen",
    "zeros",
]
