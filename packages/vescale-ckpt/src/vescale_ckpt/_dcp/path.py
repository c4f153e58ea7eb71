"""Sets the path that DCP reads or writes next, in one way for readers and writers."""

import os


class NextPath:
    """The methods of DCP's storages that are about the path alone.

    Args:
        path: of the checkpoint; None until `reset` is given one.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self._path = path

    @property
    def checkpoint_id(self) -> str | os.PathLike[str] | None:
        """What is read or written next."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Every path will do."""
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin to load or to save, at `checkpoint_id` if it is given."""
        self._path = self._path if checkpoint_id is None else checkpoint_id
