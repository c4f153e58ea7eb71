"""Models that are built without storage, and made on each rank piece by piece.

Under `deferred()` a tensor is a `DeferredTensor`: shape, dtype, device, and the steps that make its
values. The default generator moves as if the numbers had been drawn, so what follows agrees with
one device. How a value goes through the files, bottom to top:

- `draws`: which distribution a random op draws, and the place in the stream where it does.
- `tape`: steps, the buffers that they write, and which steps make a value. Data only.
- `truncated_normal`: `trunc_normal_`, which looks at what it drew.
- `replay`: runs the steps of a value on real memory, as one device did.
- `pieces`: runs them for a rank's elements only, where that gives the same bits; else it replays
  the whole of this one tensor and takes the elements from it.
- `recording`: the tensor class, and what records a call of an op.
- `value_digest`: a digest of the steps, by which ranks find out whether they build the same.
- `distributed`: a deferred tensor in, a distributed one out.
- `models`: `deferred()`, `materialize(model)`, and the places of deferred tensors in a model.
"""
