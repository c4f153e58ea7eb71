"""Whether all ranks hold the same values, found out with a few bytes.

Every rank sees the same facts and decides alike, so all raise or none does.
"""

import zlib
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from vescale_parallel._errors import DisagreementError
from vescale_parallel._messages import listed


def require_same(tensors: Mapping[str, Tensor], device_type: str, what: str, advice: str) -> None:
    """Raise on every rank, naming the tensors, unless all ranks hold the same bytes.

    Only checksums travel, in two collectives for all tensors together.

    Args:
        tensors: by the name that a message shall use.
        device_type: where the process group's tensors live.
        what: what they are, to begin the message with.
        advice: what to do, to end it with.

    Raises:
        DisagreementError: names the tensors that differ, and the ranks that disagree with rank 0.
    """
    if not several_ranks():
        return
    # Names first: lists of different lengths could not be compared in one collective.
    names = [f"{name} {tuple(one.shape)} {one.dtype}" for name, one in tensors.items()]
    other_names = _differing([zlib.crc32(repr(names).encode())], device_type)
    if other_names.any():
        raise DisagreementError(
            f"{what} differ between ranks in number, name, shape or dtype: rank {dist.get_rank()} "
            f"has {listed(names)}. {advice}"
        )
    differs = _differing([checksum(one) for one in tensors.values()], device_type)
    if differs.any():
        wrong = [name for name, bad in zip(tensors, differs.any(dim=0), strict=True) if bad]
        ranks = differs.any(dim=1).nonzero().flatten().tolist()
        raise DisagreementError(
            f"{what} differ between ranks: {listed(wrong)}; rank(s) {ranks} disagree with rank 0. "
            f"{advice}"
        )


def _differing(numbers: list[int], device_type: str) -> Tensor:
    """Bool [ranks, numbers]: where each rank's numbers are not those of rank 0."""
    mine = torch.tensor(numbers, dtype=torch.int64, device=device_type)
    everyone = torch.stack(gather(mine))
    return everyone != everyone[0]


def checksum(tensor: Tensor) -> int:
    """CRC-32 of the bytes of the elements, in row-major order."""
    return zlib.crc32(element_bytes(tensor))


def element_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor's elements, in row-major order, of any dtype."""
    flat = tensor.detach().contiguous().flatten().cpu()
    # numpy has no bfloat16 and no float8; every dtype can be seen as bytes.
    return flat.view(torch.uint8).numpy().data


def several_ranks() -> bool:
    """Whether there is anyone to agree with."""
    return dist.is_initialized() and dist.get_world_size() > 1


def gather(mine: Tensor) -> list[Tensor]:
    """One tensor of the same shape from every rank, over all processes, on the CPU."""
    received = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(received, mine)
    return [one.cpu() for one in received]
