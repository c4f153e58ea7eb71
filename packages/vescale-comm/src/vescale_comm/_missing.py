"""After a timeout: which members did not come."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vescale_comm._primitives import Primitive


def who_is_missing(primitive: "Primitive") -> str:
    """Returns a sentence."""
    return ""
