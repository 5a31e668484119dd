"""Names that tell no id, for what every user of the machine can read: control groups, and where something is mounted.

named = keyed_names()
named(lease.id)                     # the same name each time, and in another process another one
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

_KEY_BYTES: Final = 16
_HASH_BITS: Final = 64


def keyed_names() -> Callable[[str], str]:
    """Hash ids with a key of this process alone.

    The hash is the interpreter's own for texts, SipHash: ``hashlib`` would load OpenSSL, 3.5 MB in every supervisor.
    """
    key = os.urandom(_KEY_BYTES).hex()
    return lambda id_: f"{hash(key + id_) % (1 << _HASH_BITS):016x}"
