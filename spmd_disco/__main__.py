"""``python -m spmd_disco``."""

import sys

from .launch import main

if __name__ == "__main__":
    sys.exit(main())
