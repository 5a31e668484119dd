"""Builds the environment of a tenant's guest, without anything of the office's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

SYSTEM_PATH: Final = "/usr/local/bin:/usr/bin:/bin"


def clean_env(
    tenant: str,
    *,
    home: str,
    tmpdir: str = "/tmp",
    term: str = "dumb",
    path_first: str = "",
    extra: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """A new environment. Nothing is taken over from this process; ``extra`` is what the holder asked for.

    What the holder asks for may be anything, ``LD_PRELOAD`` too: it is read by the guest alone, which has no rights
    that its holder lacks. The six names below are not for asking.
    """
    found = dict(extra or {})
    found.update(
        PATH=f"{path_first}:{SYSTEM_PATH}" if path_first else SYSTEM_PATH,
        HOME=home,
        LANG="C.UTF-8",
        TERM=term,
        TMPDIR=tmpdir,
        USER=tenant,
    )
    return found
