"""Functions of the tensor as an object: metadata, Python values, refusals, aten's names."""
