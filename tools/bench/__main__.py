"""Run benchmarks by name; without a name, list them. NAME --help tells a benchmark's options."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence

from tools.bench._run import discover, run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    known = discover()
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in known and any(one.startswith("-") for one in given):
        # The options are the benchmark's own, and so is its --help.
        run(given[0], known[given[0]], given[1:])
        return 0
    options = parser.parse_args(given)
    unknown = [name for name in options.names if name not in known]
    if unknown or not options.names:
        print(f"benchmarks: {', '.join(known)}")
        print("".join(f"no benchmark is called {name}\n" for name in unknown), end="")
        return 1 if unknown else 0
    if len(options.names) == 1:
        run(options.names[0], known[options.names[0]])
        return 0
    # A process each: what one imports and caches must not flatter the next.
    command = [sys.executable, "-m", "tools.bench"]
    return max(subprocess.run([*command, name]).returncode for name in options.names)


if __name__ == "__main__":
    sys.exit(main())
