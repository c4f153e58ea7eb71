"""The native policy on CPU: torch's serial mt19937 stream, moved to each piece."""
