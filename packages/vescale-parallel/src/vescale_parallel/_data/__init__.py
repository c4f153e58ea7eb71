"""Batches that every rank reads its rows of: torch's `DataLoader`, in the order of one device.

Top to bottom (imports point down):

- `loader`: the public function, and the object that is iterated, saved and resumed.
- `rows`: which samples of a batch this rank reads; what stands in for a batch without rows here.
- `samplers`: generators that samplers hold.
- `draws`: random numbers of samples, by seeds of their own.
"""
