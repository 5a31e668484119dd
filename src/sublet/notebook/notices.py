"""Silences the client's log of notices for leases of cells, whose status line already shows them."""

from __future__ import annotations

import logging
from collections import deque
from typing import Final

LEASES_MAX: Final = 64
"""Leases whose notices may still come."""


class Notices(logging.Filter):
    """Lets everything pass but the notices of these leases."""

    def __init__(self) -> None:
        super().__init__()
        self._leases: deque[str] = deque(maxlen=LEASES_MAX)
        logging.getLogger("sublet.client").addFilter(self)

    def told_for(self, lease: str) -> None:
        """Leave out the notices of this lease here: they are told elsewhere."""
        self._leases.append(lease)

    def filter(self, record: logging.LogRecord) -> bool:
        is_notice = record.msg.startswith("lease %s will be taken") if isinstance(record.msg, str) else False
        return not (is_notice and isinstance(record.args, tuple) and str(record.args[0]) in self._leases)
