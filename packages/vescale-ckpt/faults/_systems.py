"""The checkpoint systems that are put to the test, behind one small face."""

from __future__ import annotations

import importlib.util
import os
from typing import Any, Protocol

import torch
import torch.distributed as dist
import vescale_ckpt

# Large enough to be two files of unlike size where a system writes several.
WIDE, SMALL = 16_384, 512


def state_of(number: int) -> dict[str, Any]:
    """What save number `number` holds: every part of it tells the number."""
    return {
        "w": torch.arange(float(WIDE)) + number,
        "v": torch.full((SMALL,), float(number)),
        "note": f"save {number}",
    }


def template() -> dict[str, Any]:
    """What a state is loaded into."""
    return {"w": torch.zeros(WIDE), "v": torch.zeros(SMALL), "note": ""}


def number_of(state: dict[str, Any]) -> int | None:
    """Which save a loaded state is, bit for bit; None if it is no save's."""
    number = int(state["v"][0])
    whole = state_of(number)
    same = state["w"].equal(whole["w"]) and state["v"].equal(whole["v"])
    return number if same and state["note"] == whole["note"] else None


class System(Protocol):
    """One way to save and to load."""

    name: str

    def save(self, path: str, state: dict[str, Any]) -> None:
        """Save, replacing what is at `path` if the system can."""

    def save_new(self, path: str, state: dict[str, Any]) -> None:
        """Save, and replace nothing."""

    def load(self, path: str, into: dict[str, Any]) -> dict[str, Any]:
        """Load into the tensors of `into`; the state."""


class Dcp:
    """torch.distributed.checkpoint, writing two files as two ranks would."""

    name = f"DCP (torch {torch.__version__.partition('+')[0]})"

    def save(self, path: str, state: dict[str, Any]) -> None:
        from torch.distributed import checkpoint as dcp

        writer = dcp.FileSystemWriter(path, thread_count=2)
        dcp.save(state, storage_writer=writer, no_dist=not dist.is_initialized())

    def save_new(self, path: str, state: dict[str, Any]) -> None:
        from torch.distributed import checkpoint as dcp

        writer = dcp.FileSystemWriter(path, thread_count=2, overwrite=False)
        dcp.save(state, storage_writer=writer, no_dist=not dist.is_initialized())

    def load(self, path: str, into: dict[str, Any]) -> dict[str, Any]:
        from torch.distributed import checkpoint as dcp

        dcp.load(into, checkpoint_id=path, no_dist=not dist.is_initialized())
        return into


class TorchCheckpointing:
    """The package torch_checkpointing, its synchronous saver."""

    name = "torch_checkpointing"

    def __init__(self) -> None:
        from importlib.metadata import version

        self.name = f"torch_checkpointing {version('torch_checkpointing')}"

    def _manager(self) -> Any:
        from torch_checkpointing import CheckpointManager, SyncCheckpointSaverConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        config = CheckpointManager.Config(
            save=SyncCheckpointSaverConfig(),
            # Its direct I/O writes unaligned ends, which ext4 refuses.
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
        )
        return CheckpointManager(config)

    def save(self, path: str, state: dict[str, Any]) -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        self._manager().save(path, state)

    # It never replaces.
    save_new = save

    def load(self, path: str, into: dict[str, Any]) -> dict[str, Any]:
        return dict(self._manager().load(path, into=into))


class Ours:
    """vescale_ckpt."""

    name = f"vescale-ckpt {vescale_ckpt.__version__}"

    def save(self, path: str, state: dict[str, Any]) -> None:
        vescale_ckpt.save(path, state, overwrite=True)

    def save_new(self, path: str, state: dict[str, Any]) -> None:
        vescale_ckpt.save(path, state)

    def load(self, path: str, into: dict[str, Any]) -> dict[str, Any]:
        return vescale_ckpt.load(path, into)


def present() -> tuple[list[System], list[str]]:
    """The systems that are installed, ours last, and the names of those that are not."""
    systems: list[System] = [Dcp()]
    absent = []
    if importlib.util.find_spec("torch_checkpointing"):
        systems.append(TorchCheckpointing())
    else:
        absent.append("torch_checkpointing")
    return [*systems, Ours()], absent
