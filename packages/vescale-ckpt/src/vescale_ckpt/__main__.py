"""`python -m vescale_ckpt`: look at checkpoints from a shell."""

import sys

from vescale_ckpt._cli.main import main

if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
