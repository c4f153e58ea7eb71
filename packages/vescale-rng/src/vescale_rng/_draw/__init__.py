"""The public functions that draw: fills, factories, dropouts, samples."""
