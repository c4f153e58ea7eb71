"""To and from other formats: Hugging Face's safetensors, torch.distributed.checkpoint."""
