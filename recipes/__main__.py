"""`python -m recipes digits --epochs 3`."""

import sys

from recipes.run import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
