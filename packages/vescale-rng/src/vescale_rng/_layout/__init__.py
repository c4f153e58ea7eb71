"""Which elements a rank holds, and how a fill goes through them."""
