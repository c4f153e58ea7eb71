"""Checkpoints that cannot be half-written, silently wrong, or tied to a mesh."""

from vescale_ckpt import _torch_versions as _torch_versions
from vescale_ckpt._convert.dcp_import import import_dcp
from vescale_ckpt._convert.safetensors_export import Exported, export_safetensors
from vescale_ckpt._convert.safetensors_import import import_safetensors
from vescale_ckpt._errors import (
    CheckpointError,
    CoordinationError,
    CorruptError,
    ExistsError,
    FormatError,
    MismatchError,
    NotFoundError,
    StateError,
    StorageError,
    UncommittedError,
    UnsupportedError,
)
from vescale_ckpt._inspect.inspect import Inspected, SavedChunk, SavedTensor, Statistics, inspect
from vescale_ckpt._inspect.verify import Verified, verify
from vescale_ckpt._load.load import compare, load, read
from vescale_ckpt._load.mismatch import Differences
from vescale_ckpt._manager.manager import CheckpointManager
from vescale_ckpt._progress import progress_line
from vescale_ckpt._save.async_save import SaveHandle, Staging, async_save
from vescale_ckpt._save.save import save
from vescale_ckpt._state.optimizer import init_optimizer_state
from vescale_ckpt._state.values import WHOLE, PerRank, RankLocal, Replicated
from vescale_ckpt._version import __version__

__all__ = [
    "WHOLE",
    "CheckpointError",
    "CheckpointManager",
    "CoordinationError",
    "CorruptError",
    "Differences",
    "ExistsError",
    "Exported",
    "FormatError",
    "Inspected",
    "MismatchError",
    "NotFoundError",
    "PerRank",
    "RankLocal",
    "Replicated",
    "SaveHandle",
    "SavedChunk",
    "SavedTensor",
    "Staging",
    "StateError",
    "Statistics",
    "StorageError",
    "UncommittedError",
    "UnsupportedError",
    "Verified",
    "__version__",
    "async_save",
    "compare",
    "export_safetensors",
    "import_dcp",
    "import_safetensors",
    "init_optimizer_state",
    "inspect",
    "load",
    "progress_line",
    "read",
    "save",
    "verify",
]
