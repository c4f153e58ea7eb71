"""Decides which policies serve which tensors and generators."""

import torch

from vescale_rng._cuda.generator_state import GraphGenerator
from vescale_rng._errors import DeviceError
from vescale_rng._policy import policy


def check_device(local: torch.Tensor, name: str = "local") -> None:
    """Refuse a tensor that is not on CPU, for ops that only the CPU has natively.

    Raises:
        DeviceError: always the same on every rank, whatever it holds.
    """
    # The portable maps are plain arithmetic, the same on every device.
    if local.device.type != "cpu" and policy() != "portable":
        other = ' (on CUDA, use("portable"))' if local.device.type == "cuda" else ""
        raise DeviceError(
            f"`{name}`: random numbers were asked for a tensor on {local.device}, this version of "
            f"vescale-rng draws this op on cpu only{other}"
        )


def is_cuda(local: torch.Tensor) -> bool:
    """Tell whether a tensor is drawn by the native CUDA policy."""
    return local.device.type == "cuda" and policy() == "native"


def cuda_generator(
    local: torch.Tensor, generator: torch.Generator | GraphGenerator | None
) -> torch.Generator | GraphGenerator | None:
    """Return the generator of a draw into a CUDA tensor; None is torch's default of its device.

    Raises:
        DeviceError: it is of another device, or torch has no CUDA on this machine.
    """
    if not torch.cuda.is_available():
        raise DeviceError(
            f"`local`: random numbers were asked for a tensor on {local.device}, and CUDA is not "
            "available to torch here"
        )
    # torch would raise too, but in its kernel: on ranks without elements there is no kernel.
    if generator is not None and generator.device != local.device:
        raise DeviceError(
            f"`generator`: one on {generator.device} was given for a tensor on {local.device}: "
            "give one of that device, or none for torch's default"
        )
    return generator


def torch_generator(generator: torch.Generator | GraphGenerator | None) -> torch.Generator | None:
    """Return the given generator, which is one of torch's own.

    Raises:
        DeviceError: it is a `GraphGenerator`.
    """
    # Its offset is known to the graph only when it is replayed.
    if isinstance(generator, GraphGenerator):
        raise DeviceError(
            "`generator`: a GraphGenerator was given: only the native policy draws from it, into "
            "CUDA tensors"
        )
    if generator is not None and not hasattr(generator, "device"):
        raise DeviceError(
            f"`generator`: a torch.Generator, or None for torch's default: got {generator!r:.80}"
        )
    return generator


def cpu_generator(generator: torch.Generator | GraphGenerator | None) -> torch.Generator:
    """Return the given generator, or torch's default one.

    Raises:
        DeviceError: it is not a CPU generator.
    """
    # Refuses other objects first: they might have a device as well.
    generator = torch_generator(generator)
    if generator is None:
        return torch.default_generator
    if generator.device.type != "cpu" and policy() != "portable":
        raise DeviceError(
            f"`generator`: one on {generator.device} was given, this version of vescale-rng serves "
            "cpu generators: give one, or none for torch's default"
        )
    return generator
