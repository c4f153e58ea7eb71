"""Describes which elements of a tensor a rank holds, and plans fills of them.

Pure geometry: nothing here draws a number, and only `local_like` and `layout_check` make tensors.

Reading guide:
    layout: the protocol between packages. `LayoutLike` and `BoxLike` are what any object may
        offer, `ShardLayout` and `Box` our values of it. Start here.
    placements: from placements on a mesh to a `ShardLayout`, without processes (`layout_of`).
    of_tensor: from a tensor that knows its own layout to a `ShardLayout` (`layout_of_tensor`).
    layout_check: refuses layouts that contradict themselves or the local tensor.
    fill_plan: a layout and a local tensor's strides, checked once and kept: `FillPlan`.
    window_plan, strided_runs: the parts of a layout as few strided copies out of windows of
        bounded size, for draws that cannot be made in place.
    local_like, feature_layout: layouts of tensors that go with a given one (a mask, the noise of
        features).
    real_layout: complex tensors as real ones.
"""
