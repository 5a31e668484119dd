"""The old name of ``sublet.node.agent.clean_card``."""

import sys

from sublet.node.agent.clean_card import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
