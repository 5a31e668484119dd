"""Copies published checkpoints from one volume to another, also while the source's holder saves."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from sublet.client.volume_line import lend
from sublet.errors import InvalidRequest, NotFound, SubletError
from sublet.values import LeaseId, valid_name
from sublet.wire.http import TokenView

if TYPE_CHECKING:
    from sublet.client.asking import Duration, Size
    from sublet.client.fabric import Fabric
    from sublet.client.volumes import Volume

TTL: Final = "2m"
"""TTL of the lease on a free source volume while it is read; renewed meanwhile."""
GONE_S: Final = 5.0
"""How long is waited for a volume to go in which nothing was written."""


@contextlib.contextmanager
def readable(fabric: Fabric, name: str) -> Iterator[str]:
    """A ticket with which its checkpoints may be copied. A free one is leased meanwhile.
    ``NotFound`` if the tenant has no volume of this name."""
    found = fabric.volume(name)
    if found.lease is not None:
        yield lend(fabric.address, _token(fabric, found.lease), reads=True)
        return
    with fabric.block(name=name, ttl=TTL, wait=TTL, renew="always") as lease:
        yield lend(fabric.address, _token(fabric, lease.id), reads=True)


def copy_volume(fabric: Fabric, source: Volume | str, name: str, size: Size | None, retain: Duration | None) -> Volume:
    """Behind ``Fabric.copy_volume``."""
    from sublet.state.checkpoints.store import copy_checkpoint
    from sublet.state.checkpoints.volume import VolumeStore

    old = fabric.volume(source if isinstance(source, str) else source.name)
    with contextlib.suppress(NotFound):
        fabric.volume(valid_name(name, "name"))
        raise InvalidRequest(
            f"there is a volume called {name} already", do=f"Choose another name, or `sublet volume rm {name}` first."
        )
    lease = fabric.block(old.size if size is None else size, name=name, retain=retain, ttl=TTL, renew="always")
    try:
        with lease, readable(fabric, old.name) as ticket:
            if not copy_checkpoint(VolumeStore(lease.volume_line()), ticket).number:
                raise NotFound(
                    f"volume {old.name} has no checkpoint",
                    do="Save one there first; files of other kinds are not copied.",
                )
    except SubletError:  # nothing was written, so nothing of it is kept; another try shall not find it
        _is_gone(fabric, name)
        raise
    return fabric.volume(name)


def _is_gone(fabric: Fabric, name: str) -> None:
    until_s = time.monotonic() + GONE_S
    with contextlib.suppress(SubletError):
        while time.monotonic() < until_s:
            fabric.volume(name)
            time.sleep(0.05)


def _token(fabric: Fabric, lease: LeaseId) -> str:
    return fabric._run(fabric._core.query(f"/v1/leases/{lease}/token", TokenView)).token
