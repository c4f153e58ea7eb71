"""All ranks of a world in one process.

`_scheduler` runs one thread for each rank, one at a time. `_state` is what a rank would have for
itself in a process of its own; it is swapped when ranks switch. `_group` is the process group:
members meet in `_meeting`, where their calls are compared, and the last to come moves the data.
"""
