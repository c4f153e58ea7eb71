"""Places of CUDA generators: a seed and an offset, read and moved; and both in device memory."""

from dataclasses import dataclass, replace

import torch

from vescale_rng._errors import DeviceError, RngError, StateError

_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class CudaPosition:
    """A place in the stream of a CUDA generator: all that decides the numbers that follow.

    Attributes:
        seed: what `Generator.initial_seed` answers, 64 bits.
        offset: how many 32-bit words each thread has passed, a multiple of 4.
    """

    seed: int
    offset: int

    def after(self, words: int) -> "CudaPosition":
        """Return the place `words` further.

        Raises:
            RngError: `words` is negative.
        """
        if words < 0:
            raise RngError(f"a stream has no way back: {words} words were asked for")
        return replace(self, offset=self.offset + words)


def read(generator: torch.Generator) -> CudaPosition:
    """Tell where a CUDA generator stands.

    Raises:
        DeviceError: its stream is being captured into a CUDA graph, which hides the place.
    """
    try:
        return CudaPosition(generator.initial_seed() & _MASK, generator.get_offset())
    except RuntimeError as error:
        raise DeviceError(
            f"the place of the generator on {generator.device} cannot be read ({_line(error)}): "
            "while a CUDA graph is captured, give a GraphGenerator instead of a generator"
        ) from error


def write(generator: torch.Generator, position: CudaPosition) -> None:
    """Set a CUDA generator to `position`.

    Raises:
        StateError: the offset is no multiple of 4.
        DeviceError: its stream is being captured into a CUDA graph.
    """
    if position.offset % 4 or position.offset < 0:
        raise StateError(f"a CUDA generator has no offset {position.offset}: no multiple of 4")
    try:
        # Seeding anew resets the offset, so the seed comes first; most moves keep it.
        if generator.initial_seed() & _MASK != position.seed:
            generator.manual_seed(position.seed)
        generator.set_offset(position.offset)
    except RuntimeError as error:
        raise DeviceError(
            f"the generator on {generator.device} cannot be moved ({_line(error)}): while a CUDA "
            "graph is captured, give a GraphGenerator instead of a generator"
        ) from error


def default_of(device: torch.device) -> torch.Generator:
    """Return the default generator of torch for a CUDA device."""
    index = torch.cuda.current_device() if device.index is None else device.index
    # Before CUDA is initialised there are none.
    torch.cuda.init()  # type: ignore[no-untyped-call]
    generator: torch.Generator = torch.cuda.default_generators[index]
    return generator


class GraphGenerator:
    """A place in a CUDA stream of random numbers, kept in device memory.

    Ops that draw from it read the seed and the offset when they run, and move the offset there, so
    that a captured CUDA graph draws new numbers at each replay, with no synchronisation:

        generator = GraphGenerator.of(torch.cuda.default_generators[0])
        with torch.cuda.graph(graph):
            vescale_rng.fill_(local, Normal(), layout, generator)
        graph.replay()
        generator.return_to(torch.cuda.default_generators[0])

    Every kind of op (distribution and dtype) must have run once before the capture.

    Attributes:
        seed: int64 tensor of one element: the seed's 64 bits.
        offset: int64 tensor of one element: words passed, a multiple of 4.
    """

    def __init__(self, seed: torch.Tensor, offset: torch.Tensor) -> None:
        for name, tensor in (("seed", seed), ("offset", offset)):
            if tensor.dtype != torch.int64 or tensor.numel() != 1:
                raise StateError(
                    f"the {name} of a GraphGenerator is an int64 tensor of one element, found "
                    f"{tensor.dtype} of shape {tuple(tensor.shape)}"
                )
        if seed.device != offset.device:
            raise DeviceError(
                f"a GraphGenerator has its seed and offset on one device, found {seed.device} and "
                f"{offset.device}"
            )
        self.seed = seed
        self.offset = offset

    @classmethod
    def of(cls, generator: torch.Generator) -> "GraphGenerator":
        """Make one at the place where a CUDA generator stands; not during a capture."""
        position = read(generator)
        # The same 64 bits as a signed number, which int64 holds.
        seed = position.seed - (1 << 64) if position.seed >> 63 else position.seed
        memory = torch.tensor([seed, position.offset], dtype=torch.int64, device=generator.device)
        return cls(memory[:1], memory[1:])

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.seed.device

    def position(self) -> CudaPosition:
        """Return where it stands, read from the device: this waits for the work that moves it."""
        return CudaPosition(int(self.seed.item()) & _MASK, int(self.offset.item()))

    def return_to(self, generator: torch.Generator) -> None:
        """Set a CUDA generator to its position."""
        write(generator, self.position())


def _line(error: RuntimeError) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
