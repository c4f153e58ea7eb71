"""Complex tensors as real ones, with a last dim of two: the real and the imaginary part."""

from dataclasses import replace

from vescale_rng._layout.layout import Box, ShardLayout


def real_layout_of(layout: ShardLayout) -> ShardLayout:
    """Return the layout of `torch.view_as_real` of a local tensor; kept on the given one."""
    return layout.remembered("real", lambda: _make_real(layout))


def _make_real(layout: ShardLayout) -> ShardLayout:
    order, local = layout.memory_order, layout.local_shape
    return replace(
        layout,
        global_shape=(*layout.global_shape, 2),
        boxes=tuple(map(_real, layout.boxes)),
        # In memory the two parts of an element are neighbours.
        memory_order=None if order is None else (*order, len(layout.global_shape)),
        local_shape=None if local is None else (*local, 2),
    )


def _real(box: Box) -> Box:
    strides = (*(2 * stride for stride in box.local_strides), 1)
    return Box((*box.global_offset, 0), (*box.shape, 2), 2 * box.local_offset, strides)
