"""Compares the map of dropout with torch, before it is first drawn by shards on a device."""

import warnings
from functools import cache
from threading import RLock

import numpy as np
import torch

from vescale_rng._cuda.device import Drawer, cuda_device
from vescale_rng._cuda.dropout_draw import by_kernel, waves_of
from vescale_rng._cuda.dropout_map import DropoutOp, DropoutShape, kept_elements, vector_of
from vescale_rng._cuda.kernels import have_triton
from vescale_rng._cuda.map_check import PLACE, check_capture, compare_kernel, same_bits
from vescale_rng._errors import DeviceError
from vescale_rng._layout.layout import whole

# Elements by which the widths of the vectors are told apart: no more than any device has threads.
_LOOK = 256


class DropoutRoutes:
    """What has been found out about dropout on one device, for each dtype."""

    def __init__(self, device: Drawer) -> None:
        self._device = device
        self._lock = RLock()
        self._found: dict[torch.dtype, tuple[int, str]] = {}

    def route(self, dtype: torch.dtype) -> tuple[int, str]:
        """Return the widest vector of a dtype, and why there is no kernel (or nothing).

        Raises:
            DeviceError: torch drops out by another map than this version knows, or a CUDA graph is
                being captured and the question has not been asked before.
        """
        with self._lock:
            if dtype not in self._found:
                check_capture(self._device.device, f"dropout for {dtype}")
                self._found[dtype] = self._ask(dtype)
            return self._found[dtype]

    def _ask(self, dtype: torch.dtype) -> tuple[int, str]:
        # The width follows from the dtype and the size: all that a size can lead to are checked.
        widest = self._widest(dtype)
        why = "" if have_triton() else "triton is not installed"
        vector = widest
        while vector:
            expected = self._check_map(dtype, vector, widest)
            why = why or self._differs(dtype, vector, expected)
            # Also width 1, whose map is that of other random kernels.
            vector //= 2
        if why and have_triton():
            warnings.warn(
                f"vescale-rng: dropout for {dtype} on {self._device.device}: {why}; torch draws "
                "its pieces itself, which is right but slower",
                stacklevel=2,
            )
        return widest, why

    def _widest(self, dtype: torch.dtype) -> int:
        """Find the vector of a size that every width divides, by looking at what is kept."""
        given = torch.ones(_LOOK, dtype=dtype, device=self._device.device)
        found = self._device.dropout(given, 0.5, PLACE).cpu().numpy()
        # In any order: a wrong width agrees on all of these elements with a probability below
        # 2**-200.
        for vector in (16, 8, 4, 2, 1):
            if np.array_equal(found, kept_elements(vector, _LOOK, PLACE)):
                return vector
        raise self._unknown(dtype)

    def _check_map(self, dtype: torch.dtype, vector: int, widest: int) -> torch.Tensor:
        """Return what torch keeps of several waves, after a look at how it comes about."""
        device = self._device
        # A size of exactly this width.
        numel = device.threads * (4 if vector == 1 else vector) * 2 + 3 * vector
        drop = DropoutShape(vector, device.threads, numel)
        given = torch.ones(numel, dtype=dtype, device=device.device)
        if vector_of(numel, widest) != vector:
            raise self._unknown(dtype)
        expected = device.dropout(given, 0.3, PLACE)
        waves = waves_of(drop, DropoutOp(0.3, dtype, device, device.threads), PLACE, widest)
        ranges = ((drop.wave - 5, drop.wave + 300), (2 * drop.wave, numel), (0, 700))
        if not all(same_bits(waves.take(a, b), expected[a:b]) for a, b in ranges):
            raise self._unknown(dtype)
        return expected

    def _differs(self, dtype: torch.dtype, vector: int, expected: torch.Tensor) -> str:
        drop = DropoutShape(vector, self._device.threads, expected.numel())
        op = DropoutOp(0.3, dtype, self._device, self._device.threads)

        def draw_by_kernel() -> torch.Tensor:
            found = torch.zeros_like(expected)
            by_kernel(whole(found.shape), drop, op, PLACE, found)
            return found

        return compare_kernel(draw_by_kernel, expected)

    def _unknown(self, dtype: torch.dtype) -> DeviceError:
        return DeviceError(
            f"dropout for {dtype}: torch {torch.__version__} on {self._device.device} with "
            f"{self._device.threads} threads does not draw it by the map that this version of "
            "vescale-rng knows, so a piece of it cannot be drawn alone"
        )


@cache
def dropout_routes_of(index: int) -> DropoutRoutes:
    """Return what has been found out on the CUDA device of that index."""
    return DropoutRoutes(cuda_device(index))
