"""Reading and writing by index: slices, lists of indices, masks, scatter and gather."""
