"""The errors of this package: one class for each way in which a checkpoint can be refused."""

import re
from collections.abc import Sequence

# Of a URL: `protocol://user:password@host`.
_PASSWORD = re.compile(r"(?<=://)([^\s/@:]{0,256}):[^\s/@]{1,1024}@")


def without_password(text: str) -> str:
    """Return a text in which no URL has a password any more."""
    return _PASSWORD.sub(r"\1:***@", text)


class CheckpointError(Exception):
    """Base of every error that this package raises. No message has the password of a URL."""

    def __init__(self, message: str) -> None:
        super().__init__(without_password(message))


class NotFoundError(CheckpointError):
    """There is nothing at the path."""


class UncommittedError(CheckpointError):
    """There is a directory, but no save into it was ever completed."""


class ExistsError(CheckpointError):
    """Something is at the path already, and it was not asked to be replaced."""


class CorruptError(CheckpointError):
    """Stored bytes are not those that were saved: a checksum, a size or a file is wrong."""


class FormatError(CheckpointError):
    """The manifest or a header breaks the rules of the format, or is of an unknown version."""


class UnsupportedError(FormatError):
    """The checkpoint may be sound, but needs a newer vescale-ckpt, or a package that is missing."""


class MismatchError(CheckpointError):
    """The checkpoint does not fit what it is loaded into: other keys, shapes or dtypes.

    Attributes:
        missing: The names that only `into` has: all of them, where the message shows some.
        unexpected: The names that only the checkpoint has.
        different: A sentence for each that both have, with another kind, shape or dtype.
    """

    def __init__(
        self,
        message: str,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        different: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.missing, self.unexpected = list(missing), list(unexpected)
        self.different = list(different)


class StateError(CheckpointError):
    """The state holds something that cannot be saved, or ranks disagree about it."""


class StorageError(CheckpointError):
    """The file system failed: disk full, permission denied, input/output error."""


class CoordinationError(CheckpointError):
    """The ranks lost each other: one died, or did not answer in time."""


_KINDS: tuple[type[CheckpointError], ...] = (
    NotFoundError,
    UncommittedError,
    ExistsError,
    CorruptError,
    FormatError,
    UnsupportedError,
    MismatchError,
    StateError,
    StorageError,
    CoordinationError,
)


def error_of_kind(kind: str, message: str) -> CheckpointError:
    """Rebuild an error that another rank raised, from its class name and its words."""
    by_name = {known.__name__: known for known in _KINDS}
    return by_name.get(kind, CheckpointError)(message)


def as_checkpoint_error(error: BaseException) -> CheckpointError:
    """Return `error` itself if it is ours, else one of ours that says the same."""
    if isinstance(error, CheckpointError):
        return error
    if isinstance(error, OSError):
        return StorageError(str(error))
    return CheckpointError(f"{type(error).__name__}: {error}")


def listed(items: list[str], limit: int = 8) -> str:
    """Join `items` for a message, at most `limit` of them."""
    shown = ", ".join(items[:limit])
    return shown if len(items) <= limit else f"{shown} and {len(items) - limit} more"
