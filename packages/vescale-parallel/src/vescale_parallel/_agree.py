"""Ranks agree before they go on: on whether something worked, and on values that must be the same.

Both exchange a few bytes and then every rank decides from the same facts, so all raise or none.
"""

import zlib
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from vescale_parallel._errors import DisagreementError, ParallelError, TrainError
from vescale_parallel._words import listed

T = TypeVar("T")

_TEXT_BYTES: Final = 2048


def together(action: Callable[[], T], device_type: str = "cpu") -> T:
    """Do something that may fail on some ranks only, as reading a file; if any fails, all raise.

    Raises:
        ParallelError: the error of this rank where it failed, else that of the first that did.
    """
    failure: ParallelError | None = None
    result: list[T] = []
    try:
        result.append(action())
    except ParallelError as error:
        failure = error
    except OSError as error:
        failure = TrainError(str(error))
    texts = exchange_text("" if failure is None else str(failure) or "failed", device_type)
    if failure is not None:
        raise failure
    for rank, text in enumerate(texts):
        if text:
            raise TrainError(f"rank {rank} reports: {text}")
    return result[0]


def exchange_text(text: str, device_type: str) -> list[str]:
    """Every rank's text (at most 2048 bytes of UTF-8), in rank order; one collective."""
    if not _several_ranks():
        return [text]
    mine = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
    sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device_type)
    return [
        bytes(one.cpu().tolist()).rstrip(b"\0").decode(errors="ignore") for one in _gather(sent)
    ]


def require_same(tensors: Mapping[str, Tensor], what: str, advice: str) -> None:
    """Raise on every rank, naming the tensors, unless all ranks hold the same bits.

    Only checksums travel: four bytes for each tensor, one collective for all.

    Raises:
        DisagreementError: names the tensors that differ, and a rank that disagrees with rank 0.
    """
    if not tensors or not _several_ranks():
        return
    device = next(iter(tensors.values())).device
    mine = torch.tensor([checksum(t) for t in tensors.values()], dtype=torch.int64, device=device)
    everyone = torch.stack(_gather(mine)).cpu()
    differs = (everyone != everyone[0]).any(dim=0).tolist()
    if any(differs):
        names = [name for name, bad in zip(tensors, differs, strict=True) if bad]
        ranks = (everyone != everyone[0]).any(dim=1).nonzero().flatten().tolist()
        raise DisagreementError(
            f"{what} differ between ranks: {listed(names)}; rank(s) {ranks} disagree with rank 0. "
            f"{advice}"
        )


def checksum(tensor: Tensor) -> int:
    """CRC-32 of shape, dtype and the bits of the elements, in row-major order."""
    head = f"{tuple(tensor.shape)} {tensor.dtype}".encode()
    return zlib.crc32(bits(tensor), zlib.crc32(head))


def bits(tensor: Tensor) -> memoryview:
    """The bytes of a tensor's elements, in row-major order, of any dtype."""
    flat = tensor.detach().contiguous().flatten().cpu()
    return flat.view(torch.uint8).numpy().data


def _several_ranks() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _gather(mine: Tensor) -> list[Tensor]:
    """One tensor of the same shape from every rank, over all processes."""
    received = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(received, mine)
    return received
