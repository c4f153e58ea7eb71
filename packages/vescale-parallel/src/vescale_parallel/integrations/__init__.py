"""Other people's trainers, under torchrun: each in a few lines, with the losses of one device.

- `transformers`: `parallel(Trainer)`, for `transformers.Trainer` and its subclasses (trl's too).
- `accelerate`: an `Accelerator`, and `one_process()`.
- `lightning`: strategies for Fabric and for the Trainer.
- `torchmetrics`: `of_whole_batches(metric)`.

Each rank runs the trainer as if it were alone: whole batches, one set of numbers, and no wrapper
around the model; the plan shards the batch where it enters the model. Rank 0 alone logs and writes,
and what is written is the checkpoint of one device. The libraries are imported when first needed;
`pip install 'vescale-parallel[transformers]'` and so on brings them.
"""
