"""The `flopmeter` command, and `python -m flopmeter`."""

import sys

import flopmeter


def main() -> int:
    """`--version` is answered before torch is imported, which takes seconds."""
    if sys.argv[1:] == ["--version"]:
        print(f"flopmeter {flopmeter.__version__}")
        return 0
    from flopmeter.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
