"""``python -m sublet``: the command line, without relying on a PATH. A client starts its office this way."""

from sublet.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
