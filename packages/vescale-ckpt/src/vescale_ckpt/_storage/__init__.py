"""The file operations that a checkpoint is made of, locally and through fsspec."""
