"""`python -m tools.compare`: the main job of this repository."""

import sys
from collections.abc import Sequence

from vescale_parallel import ParallelError

from tools.compare.job import compare
from tools.compare.options import parse


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when every promise was kept, 1 when one was broken, 2 when it could not be found out."""
    try:
        return 0 if compare(parse(arguments)) else 1
    except ParallelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
