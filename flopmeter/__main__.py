"""`python -m flopmeter`: the same as the `flopmeter` command."""

import sys

from flopmeter.cli import main

if __name__ == "__main__":
    sys.exit(main())
