"""How many examples a property has: a seeded part in CI, and the full number where ``make soak`` asks for it."""

from __future__ import annotations

import os

__all__ = ["examples"]


def examples(few: int, many: int = 10_000) -> int:
    return many if os.environ.get("HYPOTHESIS_PROFILE") == "soak" else few
