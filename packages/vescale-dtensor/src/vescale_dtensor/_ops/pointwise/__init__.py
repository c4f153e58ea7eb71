"""pointwise."""
