"""Plans as TOML: written by hand here, as Python's library only reads it."""

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from vescale_parallel._errors import PlanError

# From the beginning of a word on: each is looked at once.
_DEEP_KEY = re.compile(
    r"""(?<![A-Za-z0-9_-])(?:(?:[A-Za-z0-9_-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){64}"""
)


def toml_of(content: Mapping[str, Any]) -> str:
    """Return TOML text: values first, then a table for each mapping, in order.

    TOML has no word for nothing: None is written as `false`, which no field of a plan means.
    """
    # Below the head of a table a value would belong to the table.
    plain = {name: one for name, one in content.items() if not isinstance(one, Mapping)}
    tables = {name: one for name, one in content.items() if isinstance(one, Mapping)}
    lines = [f"{_key(name)} = {_value(one)}" for name, one in plain.items()]
    for name, table in tables.items():
        lines += ["", f"[{_key(name)}]"]
        lines += [f"{_key(glob)} = {_value(one)}" for glob, one in table.items()]
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    # Bare keys are a small alphabet, and globs are outside of it.
    return name if name.isidentifier() and name.isascii() else _text(name)


def _text(value: str) -> str:
    # JSON's strings are TOML's, but that TOML has no pairs of surrogates, which is how JSON writes
    # what is beyond 16 bits, and no bare DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if value is None:
        return "false"
    if isinstance(value, Mapping):
        entries = (f"{_key(name)} = {_value(one)}" for name, one in value.items())
        return "{ " + ", ".join(entries) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    raise PlanError(f"a plan as TOML cannot hold {value!r} ({type(value).__name__}).")


def read_toml(text: str) -> dict[str, Any]:
    """Return what `toml_of` wrote, or somebody by hand.

    Raises:
        PlanError: the text is not TOML.
    """
    # Python's reader walks down from the top for every part of a key.
    if _DEEP_KEY.search(text):
        raise PlanError("a plan as TOML cannot be read: a key of 64 parts is nested too deeply")
    try:
        content = tomllib.loads(text)
        return {name: _said(one) for name, one in content.items()}
    except RecursionError:
        raise PlanError("a plan as TOML cannot be read: it is nested too deeply") from None
    except ValueError as error:  # also of numbers of thousands of digits
        raise PlanError(f"a plan as TOML cannot be read: {str(error)[:300]}") from error


def _said(value: Any) -> Any:
    """Return a value as a plan has it: None where the text says `false`, at any depth."""
    if isinstance(value, dict):
        return {name: _said(one) for name, one in value.items()}
    return None if value is False else value
