"""Worlds without a launcher, and faults on purpose.

- `simulate`: all ranks of a world in one process. `scheduler` runs one thread for each rank, one at
  a time. `state` is what a rank would have for itself in a process of its own; it is swapped when
  ranks switch. `group` is the process group: members meet in `meeting`, where their calls are
  compared, and the last to come moves the data. `store` is the key-value store of the world.
- `emulator`: the collectives over lists of tensors, without ranks at all.
- `chaos`: delays, lost calls, flipped bits and deaths, in a simulation or in real processes.
"""
