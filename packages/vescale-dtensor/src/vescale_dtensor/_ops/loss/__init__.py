"""Losses: rows may be sharded; classes, too, where ranks exchange a few numbers per row."""
