"""Loading: open, match, plan the reads, fetch and verify."""
