"""The version of the control protocol, in a module of its own that loads without the typed messages."""

from __future__ import annotations

from typing import Final

WIRE_VERSION: Final = 1
"""Client and office must be at most one version apart; both send theirs in ``WIRE_HEADER``."""
WIRE_OLDEST: Final = max(1, WIRE_VERSION - 1)
"""The oldest version that an office of this one still answers."""
WIRE_HEADER: Final = "sublet-wire"
AS_TENANT_HEADER: Final = "sublet-as-tenant"
"""Sent with the value 1 by a process of root's or the owner's that means to be the tenant whose token it shows."""
FOR_TENANT_HEADER: Final = "sublet-for-tenant"
"""Sent by an operator that acts for a tenant, with its name: the request has that tenant's rights and no others."""
AS_TENANT_VARIABLE: Final = "SUBLET_AS_TENANT"
"""The same, as an environment variable with the value 1, for programs that are not told as an option."""
