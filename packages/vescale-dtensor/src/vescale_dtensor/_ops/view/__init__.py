"""Views and other rearrangements: transpose, reshape, slices, cat and split, padding, FFT."""
