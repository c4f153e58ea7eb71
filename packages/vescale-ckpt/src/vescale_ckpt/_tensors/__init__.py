"""What a rank holds of a global tensor: boxes, their arithmetic, and dtypes."""
