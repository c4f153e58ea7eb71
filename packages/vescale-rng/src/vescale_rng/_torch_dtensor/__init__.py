"""torch's own DTensor, made to draw what one device draws."""
