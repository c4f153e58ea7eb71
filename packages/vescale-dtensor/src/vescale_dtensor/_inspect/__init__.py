"""Tools that show what happens: `explain`, `strict`, `op_support`, `visualize`.

`explain` and `strict` are observers of calls. `visualize` draws which rank holds which part of a
tensor: `visualize_panels` computes the content of the picture, `visualize_text` and `visualize_svg`
draw it. No other room imports this one.
"""
