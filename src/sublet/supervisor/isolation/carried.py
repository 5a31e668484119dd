"""The old name of ``sublet.node.sandbox.carried``."""

from sublet.node.sandbox.carried import enter_carried

__all__ = ["enter_carried"]
