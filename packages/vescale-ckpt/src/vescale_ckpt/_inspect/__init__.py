"""Looks at checkpoints without loading them into a state.

Reading guide: `inspect` tells what one holds, `verify` whether every byte is as it was saved, and
`difference` what differs between two, bit by bit.
"""
