"""Boxes of global tensors that a rank holds, and the dtypes that can be stored.

Reading guide: `regions` is arithmetic on boxes in global coordinates and on the byte blocks that
contain them; `boxes` tells how such a box is stored in a local tensor (`Box`, `TensorBoxes`), and
views memory as bytes (`byte_view`);
`local_boxes` finds the boxes of anything that may be a tensor leaf of a state: a plain tensor, an
object with `__vescale_layout__`, torch's DTensor, which `torch_dtensor` reads, or a tensor with the
attributes of torch's `CheckpointableTensor`, which `checkpointable` reads. `dtypes` names dtypes.
"""
