"""Holds the outcome of a function on one rank: its result, or what it raised."""

import traceback
from dataclasses import dataclass
from typing import Any, Never


@dataclass(frozen=True, slots=True)
class Ok:
    """A rank returned.

    Attributes:
        value: what it returned; tensors are contiguous, detached and on the CPU.
    """

    value: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """A rank raised.

    Attributes:
        type_name: name of the exception's class.
        message: `str` of the exception.
        traceback: the traceback as text, causes included.
        kinds: names of the exception's class and of all its bases.
    """

    type_name: str
    message: str
    traceback: str
    kinds: tuple[str, ...] = ()

    @property
    def value(self) -> Never:
        """Raises: a rank that failed has no value."""
        raise AttributeError(f"this rank raised {self.type_name}: {self.message}\n{self.traceback}")


Outcome = Ok | Failed


def failed(error: BaseException, caller: str) -> Failed:
    """Describe what a rank raised.

    Args:
        error: what was raised.
        caller: file that called the rank's function; its own frames are left out.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == caller and trace.tb_next:
        trace = trace.tb_next  # how it was called says nothing about what went wrong
    text = "".join(traceback.format_exception(type(error), error, trace))
    kinds = tuple(base.__name__ for base in type(error).__mro__)
    return Failed(type(error).__name__, str(error), text, kinds)
