"""fast_path."""
