"""Defines rules of what optimizers and gradient scaling call: lists, fused steps."""
