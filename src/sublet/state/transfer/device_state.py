"""Whether this program has lost its devices while it lives on (it is parked, or saves after the parking lease).

What lies on a card cannot be read then: the driver would make the call wait, for ever if need be. So who is to copy
from one asks here first, and says what it left out.
"""

from __future__ import annotations

import os
from typing import Final

from sublet.errors import SubletError
from sublet.wire.page import PageReader, PageState

PAGE: Final = "SUBLET_PAGE"
_AWAY: Final = frozenset((PageState.PARKED, PageState.LEAVING))
_known: dict[str, PageReader] = {}


def devices_are_away() -> bool:
    """Costs a microsecond; always false outside a guest."""
    path = os.environ.get(PAGE, "")
    if not path:
        return False
    page = _known.get(path)
    try:
        if page is None:
            page = _known[path] = PageReader(path)
        return page.read().state in _AWAY
    except SubletError:  # no page that could say so
        return False
