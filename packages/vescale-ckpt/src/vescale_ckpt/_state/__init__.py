"""A state as a tree: names, values, and the marks that a user puts into it."""
