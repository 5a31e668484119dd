"""Assigns user ids to tenants: one each, for ever, never reused on a machine.

The numbers stand in one small file of the state folder, published whole. A number is never given to another tenant, not
even when its owner is gone: files of his may still lie somewhere, and the next owner of the number would own them.

So that two offices of root's do not give the same numbers, each takes blocks of them from one file of the machine
(``/etc/sublet/uids``), which says whose each block is. Where ``/etc`` cannot be written it lies in ``/run``: then it is
gone after a restart of the machine, and the blocks that offices have numbers of are entered anew as they come up.
``SUBLET_UIDS`` names another file, for offices that are to leave nothing behind on the machine, such as those of tests.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from sublet.errors import SubletError, Unsupported
from sublet.node.sandbox.plan import Ids
from sublet.wire.settings import UIDS_VARIABLE

FIRST: Final = 1_900_000_000
COUNT: Final = 65_536
"""A range that neither distributions nor container programs use, below the largest number that is a signed word."""

BLOCK: Final = 4096
"""Numbers that an office takes at a time."""
LAST: Final = 2**31 - 1
MACHINE_FILES: Final = ("/etc/sublet/uids", "/run/sublet/uids")
"""Where the blocks of this machine stand; the first that can be written."""
TEMPORARY: Final = ("/tmp/", "/var/tmp/", "/dev/shm/")
"""What is gone from here is gone for good; elsewhere a disk may only not be mounted."""

_VERSION: Final = 1


def allot(taken: Mapping[str, int], tenant: str, first: int, count: int, is_foreign: Callable[[int], bool]) -> int:
    """The tenant's number: its present one, else the lowest of the range that no tenant ever had. Pure."""
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
    """The file of numbers. A caller holds its lock, so two processes never give one number to two tenants."""

    def __init__(
        self,
        path: str,
        first: int = FIRST,
        count: int = COUNT,
        *,
        is_foreign: Callable[[int], bool] | None = None,
        blocks: Blocks | None = None,
    ) -> None:
        """``blocks``: where blocks are taken from; without them the whole range is this file's."""
        if first < 1 or count < 1 or first + count > 2**31:
            raise ValueError(f"no range of user numbers: {count} from {first} on")
        self._path = path
        self._first = first
        self._count = count
        self._is_foreign = is_foreign or _is_in_passwd
        self._blocks = blocks
        self._is_claimed = False

    def ids(self, tenant: str) -> Ids:
        """The tenant's user and group number, which are the same; on disk before this returns."""
        if not tenant:
            raise ValueError("a tenant without a name has no user number")
        with locked(self._path):
            taken = self._read()
            home = os.path.dirname(os.path.realpath(self._path))
            if self._blocks is not None and not self._is_claimed:
                self._blocks.claim(taken, home)
                self._is_claimed = True
            if tenant in taken:
                return Ids(taken[tenant], taken[tenant])
            if self._blocks is None:
                number = allot(taken, tenant, self._first, self._count, self._is_foreign)
            else:
                number = self._blocks.allot(taken, tenant, home, self._is_foreign)
            _publish(self._path, {"version": _VERSION, "uids": {**taken, tenant: number}}, 0o600)
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


class Blocks:
    """The blocks of the whole machine: first number → the state folder of the office that has it."""

    def __init__(self, path: str) -> None:
        self._path = path

    @classmethod
    def of_machine(cls, paths: Sequence[str] = ()) -> Blocks | None:
        """In the first place that can be written; None where there is none, and each office has the whole range."""
        named = os.environ.get(UIDS_VARIABLE, "")
        for path in paths or ((named,) if named else MACHINE_FILES):
            with contextlib.suppress(OSError):
                os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
                with locked(path):
                    return cls(path)
        return None

    def claim(self, taken: Mapping[str, int], home: str) -> None:
        """Enter the blocks of the numbers that this office has given. Raises ``SubletError`` if one of them is of an
        office that is still there: two offices have the same numbers when the state folder of one is a copy, and
        guests of one could then end those of the other and read their files."""
        with self._changed() as owners:
            for first in {FIRST + (number - FIRST) // BLOCK * BLOCK for number in taken.values()}:
                if not os.path.isdir(owners.get(first, "")):  # its state folder was moved here, or is gone
                    owners[first] = home
                elif owners[first] != home:
                    raise SubletError(
                        f"the state folder {home} has the same user numbers as that of another office, "
                        f"{owners[first]}: one is a copy of the other, and their guests would be the same user",
                        do="Remove the one that is not needed (`sublet purge` there), then start this office again.",
                    )

    def allot(self, taken: Mapping[str, int], tenant: str, home: str, is_foreign: Callable[[int], bool]) -> int:
        """A number for one more tenant of this office, from a block of its own: one that it has, else a new one."""
        with self._changed() as owners:
            for first in sorted(first for first, owner in owners.items() if owner == home):
                with contextlib.suppress(Unsupported):
                    return allot(taken, tenant, first, BLOCK, is_foreign)
            free = (first for first in range(FIRST, LAST - BLOCK, BLOCK) if first not in owners)
            for first in free:
                owners[first] = home
                with contextlib.suppress(Unsupported):
                    return allot(taken, tenant, first, BLOCK, is_foreign)
            raise Unsupported(
                "the offices of this machine have all user numbers that there are",
                do=f"Remove lines of offices that are gone for good from {self._path}.",
            )

    @contextlib.contextmanager
    def _changed(self) -> Iterator[dict[int, str]]:
        """The blocks, without those of offices that are gone for good; written again if they are others then."""
        with locked(self._path):
            before = self._read()
            owners = {first: owner for first, owner in before.items() if not _is_gone(owner)}
            yield owners
            if owners != before:
                blocks = {str(first): owner for first, owner in sorted(owners.items())}
                _publish(self._path, {"version": _VERSION, "blocks": blocks}, 0o644)

    def _read(self) -> dict[int, str]:
        try:
            with open(self._path, "rb") as file:
                read = json.loads(file.read())
            if read["version"] != _VERSION:
                raise ValueError("it is not of a version known here")
            return {int(first): str(owner) for first, owner in read["blocks"].items()}
        except FileNotFoundError:
            return {}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SubletError(
                f"the file of this machine's user numbers {self._path} is damaged: {error}",
                do="Correct it, or remove it: the blocks that offices have numbers of are entered anew.",
            ) from None


def _is_gone(home: str) -> bool:
    return home.startswith(TEMPORARY) and not os.path.isdir(home)


def _publish(path: str, content: object, mode: int) -> None:
    temporary = f"{path}.new"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    with open(fd, "w") as file:
        os.fchmod(fd, mode)
        file.write(json.dumps(content, indent=1, sort_keys=True))
        file.flush()
        os.fsync(fd)
    os.rename(temporary, path)
    folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextlib.contextmanager
def locked(path: str) -> Iterator[None]:
    """Be the only one who changes this file."""
    fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
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
