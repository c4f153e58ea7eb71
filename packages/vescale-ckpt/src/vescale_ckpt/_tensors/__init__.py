"""Which boxes of which global tensor a rank holds.

Reading guide: `regions` is arithmetic on boxes in global coordinates and the byte blocks that they
lie in; `boxes` says where such a box lies in a local tensor (`Box`, `TensorBoxes`); `local_boxes`
finds the boxes of anything that may be a tensor leaf of a state: a plain tensor, an object with
`__vescale_layout__`, or torch's DTensor, which `torch_dtensor` reads. `dtypes` names dtypes.
"""
