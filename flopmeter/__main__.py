"""The `flopmeter` command, and `python -m flopmeter`."""

import sys

import flopmeter


def main() -> int:
    """`--version` is answered before torch is imported, which takes seconds."""
    if sys.argv[1:] == ["--version"]:
        print(f"flopmeter {flopmeter.__version__}")
        return 0
    try:
        from flopmeter.cli import main as run
    except KeyboardInterrupt:  # while torch is imported; later the command itself tells
        print("flopmeter: interrupted", file=sys.stderr)
        return 130
    return run()


if __name__ == "__main__":
    sys.exit(main())
