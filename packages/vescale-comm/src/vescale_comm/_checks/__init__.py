"""Checks before anything is sent, so that a mistake is an error and not a hang.

`arguments` and `chunk_sizes` are what one rank can see by itself; every collective calls them.
`agreement` is `checked()`: members compare their calls over the group's store; `p2p_checks` does
the same for messages between two of them.
"""
