"""Conversion from and to the formats of others.

Reading guide: `safetensors_import` and `safetensors_export` are for Hugging Face's files,
`dcp_import` for checkpoints of torch.distributed.checkpoint, of which no code is executed: it reads
what `dcp_metadata` has found to be stored.
"""
