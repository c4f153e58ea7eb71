"""Reductions, scans, softmax's derivatives, topk, unique, counting."""
