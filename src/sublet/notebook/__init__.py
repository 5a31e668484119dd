"""``%%gpu``: runs cells on a leased device, in a notebook that holds nothing in between."""

from __future__ import annotations

__all__: list[str] = []
