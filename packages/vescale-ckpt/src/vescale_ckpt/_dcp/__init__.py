"""The storage side of torch.distributed.checkpoint (DCP), in this package's format.

DCP plans and talks between ranks; these classes write and read. What DCP saves through them is an
ordinary checkpoint of FORMAT.md, and what `save` has saved can be loaded by DCP.

Reading guide: `names` is the map between DCP's flat names and the saved tree; `place` is what the
coordinator tells every rank about a save; `writer` and `reader` are torch's two interfaces.
"""
