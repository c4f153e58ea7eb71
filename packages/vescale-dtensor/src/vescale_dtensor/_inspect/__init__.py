"""Seeing what happens: `explain`, `strict`, `op_support`, `visualize`. Nothing depends on it.

`explain` and `strict` are observers of calls. `visualize` draws which rank holds what:
`visualize_panels` says what is to be seen, `visualize_text` and `visualize_svg` draw it.
"""
