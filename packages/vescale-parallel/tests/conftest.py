"""One thread per process: the machine's cores are shared by the ranks of a test."""

import torch

torch.set_num_threads(1)
