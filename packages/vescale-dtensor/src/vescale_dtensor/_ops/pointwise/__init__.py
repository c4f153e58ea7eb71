"""Element by element, with broadcasting; casts; complex numbers."""
