"""JSON as the format allows it: no duplicate keys, no nan, no bottomless nesting."""

import json
import math
from collections import Counter
from typing import Any

from vescale_ckpt._errors import FormatError


def dumps(value: Any) -> bytes:
    """Encode as compact UTF-8 JSON."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def number(value: float) -> float | str:
    """Return a float as JSON can hold it: JSON has no nan and no infinities, so these as text."""
    value = float(value)
    return value if math.isfinite(value) else str(value)


def loads(data: bytes, where: str) -> Any:
    """Parse untrusted JSON; raises `FormatError` naming `where` it came from."""
    try:
        return json.loads(
            data.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=_no_constant
        )
    except RecursionError:
        # Python's parser recurses; it stops by itself, well before the stack is used up.
        raise FormatError(f"{where}: nested too deeply") from None
    except ValueError as error:
        raise FormatError(f"{where}: not the JSON that the format asks for: {error}") from None


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Two readers could each use another one of two equal keys.
    found = dict(pairs)
    if len(found) < len(pairs):
        # Counted in one pass: the search must stay cheap for a million keys.
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"key {twice[:80]!r} appears twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
