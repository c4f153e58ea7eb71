"""Files that commands write."""

from pathlib import Path

from vescale_parallel._errors import PlanError


def write_file(file: Path, text: str) -> None:
    """Write text to the file that a user named.

    Raises:
        PlanError: it cannot be written; so that a command says it in a line.
    """
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanError(f"'{file}' cannot be written: {error}") from error
