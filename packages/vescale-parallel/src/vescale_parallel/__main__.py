"""`python -m vescale_parallel`: see `_cli`."""

import sys

from vescale_parallel._cli.arguments import main

if __name__ == "__main__":
    sys.exit(main())
