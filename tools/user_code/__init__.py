"""Holds what a user writes to train Llama 3 in parallel; `tools.code_lines` counts it."""
