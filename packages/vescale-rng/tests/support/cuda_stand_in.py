"""A CUDA device where there is none: the public functions on CPU tensors, drawn by the model."""

from contextlib import contextmanager
from unittest import mock

import torch
from vescale_rng._cuda import bernoulli as cuda_bernoulli
from vescale_rng._cuda import dropout as cuda_dropout
from vescale_rng._cuda import fill as cuda_fill
from vescale_rng._cuda.generator_state import CudaPosition
from vescale_rng._draw import devices, probabilities
from vescale_rng._draw import dropout as draw_dropout
from vescale_rng._draw import fill as draw_fill


class StandInGenerator:
    """The methods of a CUDA generator that the package uses, as torch documents them."""

    def __init__(self, seed=0, offset=0, device="cpu"):
        self.device = torch.device(device)
        self.capturing = False
        self._seed, self._offset = seed, offset

    def _check(self):
        if self.capturing:
            raise RuntimeError("Cannot call CUDAGeneratorImpl::get_offset during a capture")

    def initial_seed(self):
        self._check()
        return self._seed

    def get_offset(self):
        self._check()
        return self._offset

    def manual_seed(self, seed):
        self._seed, self._offset = seed, 0
        return self

    def set_offset(self, offset):
        self._check()
        self._offset = offset

    @property
    def place(self):
        return CudaPosition(self._seed, self._offset)


@contextmanager
def stand_in(device, routes, dropout_routes, bernoulli_routes):
    """Inside, CPU tensors are drawn as CUDA tensors of that model device are."""
    found = {
        "is_cuda": lambda local: True,
        "cuda_device": lambda index: device,
        "threads_of": lambda _: device.threads,
        "routes_of": lambda index: routes,
        "dropout_routes_of": lambda index: dropout_routes,
        "bernoulli_routes_of": lambda index: bernoulli_routes,
    }
    modules = (draw_fill, draw_dropout, probabilities, cuda_fill, cuda_dropout, cuda_bernoulli)
    patches = [
        mock.patch.object(module, name, value)
        for module in modules
        for name, value in found.items()
        if hasattr(module, name)
    ]
    patches.append(mock.patch.object(devices.torch.cuda, "is_available", return_value=True))
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()
