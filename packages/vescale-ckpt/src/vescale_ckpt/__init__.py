"""Checkpoints that cannot be half-written, silently wrong, or tied to a mesh."""

from vescale_ckpt._async import SaveHandle, Staging, async_save
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
)
from vescale_ckpt._export import Exported, export_safetensors
from vescale_ckpt._import import import_safetensors
from vescale_ckpt._import_dcp import import_dcp
from vescale_ckpt._inspect import (
    Inspected,
    SavedChunk,
    SavedTensor,
    Statistics,
    inspect,
)
from vescale_ckpt._load import compare, load, read
from vescale_ckpt._manager import CheckpointManager
from vescale_ckpt._optim import init_optimizer_state
from vescale_ckpt._progress import progress_line
from vescale_ckpt._report import Differences
from vescale_ckpt._save import save
from vescale_ckpt._values import WHOLE, PerRank, RankLocal, Replicated
from vescale_ckpt._verify import Verified, verify
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
