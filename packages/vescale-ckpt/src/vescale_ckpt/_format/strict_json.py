"""JSON as the format allows it: no duplicate keys, no nan, no bottomless nesting."""

import json
import math
from typing import Any

from vescale_ckpt._errors import FormatError
from vescale_ckpt._untrusted import parse_json


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
        return parse_json(data)
    except ValueError as error:
        raise FormatError(f"{where}: not the JSON that the format asks for: {error}") from None
