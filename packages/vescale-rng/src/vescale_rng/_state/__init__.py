"""Where a generator stands: read, moved, saved as JSON, compared over ranks."""
