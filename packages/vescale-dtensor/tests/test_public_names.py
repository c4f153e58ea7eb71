"""What users import is where they find it, and no public name has gone."""

import pkgutil

import torch
import vescale_dtensor as vd

NAMES = """
AttentionWay CaptureError Captured DTensor DTensorError DeviceMesh DisagreementError Explanation
Gathering GradientKeeper InterleavedShard Joint LayoutError MeshError ParameterStorage Partial
PendingGradient Placement Program RaggedShard Replicate Shard StoredSlice StrictError StridedShard
UnsupportedError __version__ arange attention_way before_backward capture checkpoint
distribute_module distribute_tensor empty explain full gathered gradient_total half_sums
init_device_mesh joint joint_stored keep_alive keep_gradient layout_differences linspace local_leaf
local_leaves local_map logspace memories_of normal note_written ones op_support permit_writes rand
randint randn randperm reduce_gradients refuse_writes register_rule release_kept_gradient
separate_memory
sequence_attention set_gradient_reducer strict sum_whole untraced visualize written_unseen zeros
"""
# Of DTensor, beyond what every tensor has.
METHODS = """
device_mesh from_local from_torch full_tensor placements redistribute to_local to_torch
"""
MODULES = {
    f"vescale_dtensor{name}"
    for name in [
        "", ".debug", ".experimental", ".parallel", ".placement_types", ".rules", ".state_dict"
    ]
}  # fmt: skip


def test_the_package_exports_these_names_and_has_them():
    assert sorted(vd.__all__) == sorted(NAMES.split())
    assert [name for name in NAMES.split() if not hasattr(vd, name)] == []


def test_a_dtensor_has_these_methods():
    own = {name for name in vars(vd.DTensor) if not name.startswith("_")}
    assert sorted(name for name in own if not hasattr(torch.Tensor, name)) == METHODS.split()


def test_there_are_no_other_public_modules():
    found = {m.name for m in pkgutil.iter_modules(vd.__path__) if not m.name.startswith("_")}
    assert {f"vescale_dtensor.{name}" for name in found} | {"vescale_dtensor"} == MODULES
