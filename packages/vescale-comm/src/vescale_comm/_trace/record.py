"""Defines the record of one collective."""

from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class Record:
    """One collective, as this rank issued it.

    Attributes:
        op: `"all_reduce"`, `"all_gather"`, `"reduce_scatter"`, `"all_to_all"`, `"broadcast"`,
            `"scatter"`, `"permute"`, `"send"`, `"recv"`, `"reduce"` (only as the gradient of a
            broadcast, or torch's), `"gather"` (torch's) or `"barrier"`.
        group: short name of the group: its axes, else its ranks.
        axes: names of the mesh axes that the group flattens; empty without a mesh.
        ranks: global ranks of the members.
        bytes: bytes that this rank sends (see `trace`).
        shape: shape of this rank's input; the flat buffer's for all_to_all and gather_pieces.
        dtype: dtype of this rank's input.
        start: when it was issued, in nanoseconds of `time.time_ns`'s clock.
        end: when it was complete; an asynchronous one when it was waited for, 0 until then. Of what
            lies on an accelerator: when it had been handed to it, or its stream told to wait for
            it, as the host does not wait. Of torch's own: when it was launched.
        site: "file:line in function" of the caller.
        device: type of the device of this rank's input.
        of_torch: whether torch.distributed issued it itself; see `trace(torch=True)`.
    """

    op: str
    group: str
    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    start: int = field(default=0, compare=False)
    end: int = field(default=0, compare=False)
    site: str = field(default="", compare=False)
    device: str = field(default="cpu", compare=False)
    of_torch: bool = field(default=False, compare=False)

    @property
    def times_launch(self) -> bool:
        """Whether its time is that of its launch, and not until it was done."""
        return self.of_torch or self.device != "cpu"
