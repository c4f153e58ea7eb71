"""Asks a device for its threads, and for numbers that torch draws there."""

from functools import lru_cache
from typing import Protocol

import torch

from vescale_rng._cuda.generator_state import CudaPosition, read, write
from vescale_rng._cuda.thread_map import THREADS_PER_BLOCK, threads_of_processors
from vescale_rng._distributions import Distribution
from vescale_rng._errors import DeviceError

# What `use_threads` was asked, by device.
_asked: dict[int, int] = {}


class Drawer(Protocol):
    """A device that draws as torch does; the tests play one in numpy."""

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""

    @property
    def threads(self) -> int:
        """The most threads that its random kernels run on."""

    def draw(self, distribution: Distribution, out: torch.Tensor, place: CudaPosition) -> int:
        """Fill `out` by torch's own method from `place`; the offset that it leaves."""

    def dropout(self, given: torch.Tensor, p: float, place: CudaPosition) -> torch.Tensor:
        """Return the mask of torch's dropout of `given` from `place`."""


class CudaDevice:
    """A CUDA device, drawing with generators of its own: no other is changed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._threads = _threads_of(device)

    @property
    def device(self) -> torch.device:
        """See `Drawer.device`."""
        return self._device

    @property
    def threads(self) -> int:
        """See `Drawer.threads`."""
        return self._threads

    def draw(self, distribution: Distribution, out: torch.Tensor, place: CudaPosition) -> int:
        """See `Drawer.draw`."""
        generator = torch.Generator(self._device)
        write(generator, place)
        distribution.draw(out, generator)
        return read(generator).offset

    def dropout(self, given: torch.Tensor, p: float, place: CudaPosition) -> torch.Tensor:
        """Return the mask of torch's dropout of `given` from `place`."""
        # Dropout takes no generator, so the default one is used and restored.
        with torch.random.fork_rng([self._device]):
            write(torch.cuda.default_generators[self._device.index], place)
            mask: torch.Tensor = torch.native_dropout(given, p, True)[1]
        return mask


@lru_cache(maxsize=64)
def cuda_device(index: int) -> CudaDevice:
    """Return the CUDA device of that index.

    Raises:
        DeviceError: torch does not say how many threads it has.
    """
    return CudaDevice(torch.device("cuda", index))


def _threads_of(device: torch.device) -> int:
    properties = torch.cuda.get_device_properties(device)
    try:
        processors = properties.multi_processor_count
        return threads_of_processors(processors, properties.max_threads_per_multi_processor)
    except AttributeError as error:
        raise DeviceError(
            f"torch {torch.__version__} does not say how many threads {device} has ({error}), and "
            "the numbers of one device depend on it"
        ) from error


def threads_of(device: torch.device) -> int:
    """Return the threads whose numbers are drawn on a device: its own, or those asked for.

    The random numbers of CUDA depend on how many threads the GPU model has. A state that was saved
    on another model names its threads, and `use_threads` makes them count.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    # Not a context variable: the threads of a CUDA backward, which draw again what checkpointing
    # has dropped, would not see it. Like the generator that it belongs to, it is the process's.
    return _asked.get(index) or cuda_device(index).threads


def use_threads(threads: int | None, device: torch.device) -> None:
    """Draw the numbers of a GPU with that many threads on `device` from now on.

    Args:
        threads: what `threads_of` answered there, a multiple of 256; None is the device's own.
        device: a CUDA device with an index.

    Raises:
        DeviceError: no GPU has so many threads.
    """
    if threads is None:
        _asked.pop(device.index, None)
        return
    if threads <= 0 or threads % THREADS_PER_BLOCK:
        raise DeviceError(
            f"no GPU draws with {threads} threads: they are a positive multiple of "
            f"{THREADS_PER_BLOCK}"
        )
    _asked[device.index] = threads
