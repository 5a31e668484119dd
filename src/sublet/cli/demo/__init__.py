"""``sublet demo``: the whole thing in under a minute, in a temporary folder, on host devices, with nothing asked."""

from __future__ import annotations

from sublet.cli.exits import DONE

__all__ = ["demo"]


def demo() -> int:
    """Watch two tenants share one device: under a minute, no question asked.

    An office is opened in a temporary folder and removed afterwards; nothing of yours is touched, and no GPU is needed.
    Everything that is claimed on the way is checked, and the exit status is 1 if anything does not hold.
    """
    from sublet.cli.demo.story import tell

    tell()
    return DONE
