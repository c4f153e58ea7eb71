"""The first minutes on a GPU: `python -m tools.first_gpu`, from a plain checkout.

What it finds out comes home as one list, in two files: `report.json`, and `report.md` to read.

From the command line (`options`) comes a list of sections (`catalogue`), which `schedule` shares
the minutes out to. Each section is run by `watch` in a process of its own (`child`), case after
case (`cases`); what a case found (`findings`) is appended to a file at once, so that a crash or a
hang takes nothing else along. `report` makes the two files of it. What the sections ask stands in
`sections/`, the models that they train in `models`.

It needs torch and numpy, and no installation: `paths` puts the packages of the checkout on the
path. What needs more (CUDA, triton, a compiler) says so in one line where that is not there.
"""
