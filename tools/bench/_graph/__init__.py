"""Small training steps as torch.fx graphs, and what is measured of their memory."""
