"""One user number for one tenant, from a range the operator declared; the same one for ever, and never given twice.

The numbers stand in one small file of the state folder, published whole. A number is never given to another tenant, not
even when its owner is gone: files of his may still lie somewhere, and the next owner of the number would own them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from sublet.errors import SubletError, Unsupported
from sublet.supervisor.isolation.plan import Ids

__all__ = ["COUNT", "FIRST", "Uids", "allot"]

FIRST: Final = 1_900_000_000
COUNT: Final = 65_536
"""A range that neither distributions nor container programs use, below the largest number that is a signed word."""

_VERSION: Final = 1


def allot(taken: Mapping[str, int], tenant: str, first: int, count: int, is_foreign: Callable[[int], bool]) -> int:
    """The tenant's number: the one he has, else the lowest of the range that nobody ever had. Pure."""
    if tenant in taken:
        return taken[tenant]
    used = frozenset(taken.values())
    for number in range(first, first + count):
        if number not in used and not is_foreign(number):
            return number
    raise Unsupported(
        f"all {count} user numbers from {first} on are given away",
        do="Declare a larger range; numbers once given are not given again.",
    )


class Uids:
    """The file of numbers. Whoever asks holds its lock, so two processes never give one number to two tenants."""

    def __init__(
        self, path: str, first: int = FIRST, count: int = COUNT, *, is_foreign: Callable[[int], bool] | None = None
    ) -> None:
        if first < 1 or count < 1 or first + count > 2**31:
            raise ValueError(f"no range of user numbers: {count} from {first} on")
        self._path = path
        self._first = first
        self._count = count
        self._is_foreign = is_foreign or _is_in_passwd

    def ids(self, tenant: str) -> Ids:
        """The tenant's user and group number, which are the same; on disk before this returns."""
        if not tenant:
            raise ValueError("a tenant without a name has no user number")
        with self._locked():
            taken = self._read()
            number = allot(taken, tenant, self._first, self._count, self._is_foreign)
            if tenant not in taken:
                self._write({**taken, tenant: number})
        return Ids(number, number)

    def _read(self) -> dict[str, int]:
        try:
            with open(self._path, "rb") as file:
                return _parse(file.read())
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise SubletError(
                f"the file of user numbers {self._path} is damaged: {error}",
                do="Restore it from a backup. A new one could give a tenant the files of another.",
            ) from None

    def _write(self, taken: Mapping[str, int]) -> None:
        text = json.dumps({"version": _VERSION, "uids": taken}, indent=1, sort_keys=True)
        temporary = f"{self._path}.new"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with open(fd, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(fd)
        os.rename(temporary, self._path)
        folder = os.open(os.path.dirname(self._path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fd = os.open(f"{self._path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def _parse(raw: bytes) -> dict[str, int]:
    read = json.loads(raw)
    if not isinstance(read, dict) or read.get("version") != _VERSION or not isinstance(read.get("uids"), dict):
        raise ValueError("it is not of a version known here")
    taken: dict[str, int] = read["uids"]
    if not all(type(number) is int and number > 0 for number in taken.values()):
        raise ValueError("a number in it is none")
    if len(set(taken.values())) != len(taken):
        raise ValueError("two tenants have the same number")
    return taken


def _is_in_passwd(number: int) -> bool:
    import pwd

    try:
        pwd.getpwuid(number)
    except KeyError:
        return False
    return True
