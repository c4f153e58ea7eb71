"""Run it: `python -m tools.first_gpu --help`."""

import sys

from tools.first_gpu.job import main

if __name__ == "__main__":
    sys.exit(main())
