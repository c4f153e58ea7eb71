"""Functions that are other torch functions, one after the other: each step has its own rule."""
