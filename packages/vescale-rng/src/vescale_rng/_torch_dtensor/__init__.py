"""torch's own `DTensor`, made to draw what one device draws: the inside of `consistent`.

Reading guide:
    hooks: puts our functions in the place of torch's, and takes them out again. The one module
        that uses names that are private to torch.
    ops: what each random op of ATen does on a `DTensor`.
"""
