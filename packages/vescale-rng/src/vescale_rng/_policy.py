"""Which map from places to numbers is in force: a context variable, read when an op is called."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from vescale_rng._errors import PolicyError

_POLICIES = ("native",)
_current: ContextVar[str] = ContextVar("vescale_rng_policy", default="native")


def policy() -> str:
    """The policy in force; "native" unless `use` says otherwise."""
    return _current.get()


@contextmanager
def use(name: str) -> Iterator[None]:
    """Draw by the policy ``name`` inside the ``with`` block.

    Args:
        name: "native", the numbers of stock torch on one device.

    Raises:
        PolicyError: this version does not have the policy; "portable" comes with a later one.
    """
    if name not in _POLICIES:
        later = " (it comes with a later version)" if name == "portable" else ""
        raise PolicyError(
            f'policy "{name}" was asked for{later}, this version of vescale-rng has '
            f"{', '.join(_POLICIES)}"
        )
    token = _current.set(name)
    try:
        yield
    finally:
        _current.reset(token)
