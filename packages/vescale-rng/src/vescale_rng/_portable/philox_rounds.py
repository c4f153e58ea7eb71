"""Philox4x32-10's constants (Salmon, Moraes, Dror, Shaw: Parallel Random Numbers, SC 2011)."""

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
"""Of the counter's words 0 and 2."""

INCREMENTS = (0x9E3779B9, 0xBB67AE85)
"""What a round adds to the lower and to the upper word of the key, modulo 2**32."""

ROUNDS = 10
