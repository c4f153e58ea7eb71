"""Encodes elements of tensors for the way, and reduces them on arrival. No communication.

- `backend_dtypes`: dtypes that every backend moves; all others travel as bytes.
- `fold`: the stated orders of a reduction (`order=`), and the elementwise functions they apply.
- `reduction`: which reductions exist for a dtype, and how each one is carried by a backend.
- `formats`: the compressed formats (`wire=`), with their error bounds; `block_format` is the layout
  that they share with the Triton `kernels`.
"""
