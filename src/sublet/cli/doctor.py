"""``sublet doctor``: reports what this machine offers an office, and what is broken, with the remedy.

A check is a function that returns one finding. It changes nothing that was there before: what it writes, it removes.
"""

from __future__ import annotations

import errno
import os
import platform
import stat
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from typing import Annotated, Final, NamedTuple

from sublet.cli.call import CommandOffice, NoOffice
from sublet.cli.data_door import data_door_trouble
from sublet.cli.declare import Opt
from sublet.cli.exit_status import DONE, FAILED
from sublet.cli.parsing import AsJson
from sublet.cli.show import document, paint, plural, seconds, visible
from sublet.client.home import home_dir, socket_path
from sublet.errors import InvalidRequest, NotFound, SubletError, Unauthorized
from sublet.invocation import typeable
from sublet.values import GIB, format_size
from sublet.wire.unix import check_folder, check_parents

DISK_FREE_MIN: Final = GIB
NARROW: Final = 30
"""Columns behind the subjects below which lines are left to the terminal."""
_FULL_DO: Final = (
    "No new lease is granted until there is room: end leases of blocks, remove volumes (`sublet volume rm`) or other "
    "files."
)
SYNC_SLOW_S: Final = 0.05
"""Above this every grant is felt to hesitate: each waits for one sync."""


class CheckFinding(NamedTuple):
    """What one check found."""

    subject: str
    state: str
    """``ok``, ``note`` (works, but know this) or ``broken``."""
    text: str
    do: str = ""


def doctor(
    *,
    strict: Annotated[bool, Opt("--strict", help="Fail if this machine does not isolate several tenants.")] = False,
    gpu: Annotated[bool, Opt("--gpu", help="Test only the GPUs, and print the time of every step.")] = False,
    report: Annotated[
        str | None, Opt("--report", metavar="FILE", help="New file for the findings as text, to attach to an issue.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Check what this machine has and allows.

    Exit status 1 if something is broken. It changes nothing.
    """
    if report is not None and os.path.lexists(report):
        raise InvalidRequest(f"{report} is there already", do="Name a file that is not there yet.")
    if gpu:
        from sublet.cli.doctor_devices import gpu_checks

        checks = {"platform": _check_platform, "Python": _check_python, **gpu_checks()}
    else:
        checks = _checks()
    findings = [_safely(subject, check) for subject, check in checks.items()]
    if strict:
        from sublet.cli import doctor_strict

        findings += [_safely(subject, check) for subject, check in doctor_strict.strict_checks().items()]
        findings = doctor_strict.judged(findings, CheckFinding)
    if report:
        _write_report(report, findings)
    broken = sum(finding.state == "broken" for finding in findings)
    if as_json:
        document([finding._asdict() for finding in findings])
        return FAILED if broken else DONE
    width = max(len(finding.subject) for finding in findings)
    colours = {"ok": "green", "note": "yellow", "broken": "red"}
    for finding in findings:
        mark = paint(finding.state.ljust(6), colours[finding.state])
        first, *more = [*_wrapped(typeable(finding.text), 10 + width), *_wrapped(typeable(finding.do), 10 + width)]
        print(f"{mark}  {finding.subject.ljust(width)}  {first}")
        for line in more:
            print(f"{' ' * (10 + width)}{line}")
    print()
    if strict:
        what = "would hold for several tenants" if not broken else f"would not: {plural(broken, 'thing')} broken"
        print(f"This machine {what}.")
    else:
        print("Nothing is broken." if not broken else f"{plural(broken, 'thing')} broken.")
    return FAILED if broken else DONE


def _write_report(path: str, findings: list[CheckFinding]) -> None:
    """All of it as text, for others to read: findings only, and the home of the user as ``~``."""
    from sublet import __version__

    lines = [f"sublet {__version__}", *(" | ".join(filter(None, finding)) for finding in findings)]
    text = "\n".join(lines).replace(os.path.expanduser("~"), "~")
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text + "\n")
    except OSError as error:
        raise InvalidRequest(
            f"the findings cannot be written to {path}: {error.strerror}", do="Name a file in a folder of yours."
        ) from error


def _wrapped(text: str, before: int) -> list[str]:
    """In lines of the terminal's width, behind the subjects; as one where there is no terminal."""
    columns = os.get_terminal_size(1).columns if sys.stdout.isatty() else 0
    if columns < before + NARROW:
        return [visible(text)] if text else []
    return textwrap.wrap(visible(text), columns - before, break_long_words=False, break_on_hyphens=False)


def _safely(subject: str, check: Callable[[], tuple[str, str] | tuple[str, str, str]]) -> CheckFinding:
    """A check that cannot be carried out is a finding too, and does not keep the others from theirs."""
    try:
        return CheckFinding(subject, *check())
    except SubletError as error:
        return CheckFinding(subject, "broken", error.message, error.do)
    except OSError as error:
        return CheckFinding(subject, "broken", f"cannot be checked: {error}")


def _check_platform() -> tuple[str, str] | tuple[str, str, str]:
    platform_text = f"{platform.system()} {platform.release()}, {platform.machine()}"
    if sys.platform != "linux":
        return "broken", platform_text, "An office runs on Linux; from here, set SUBLET_URL to one that runs elsewhere."
    return "ok", platform_text


def _check_python() -> tuple[str, str] | tuple[str, str, str]:
    python_text = f"{platform.python_version()} at {sys.executable}"
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        return "broken", python_text, "Sublet is made for Python 3.11 to 3.13."
    return "ok", python_text


def _check_sqlite() -> tuple[str, str] | tuple[str, str, str]:
    try:
        import sqlite3
    except ImportError:
        return "broken", "this Python has no sqlite3 module", "Use a Python that was built with SQLite."
    return "ok", f"{sqlite3.sqlite_version}, {'thread-safe' if sqlite3.threadsafety else 'not thread-safe'}"


def _check_clock() -> tuple[str, str] | tuple[str, str, str]:
    from sublet.clock import SystemClock

    clock = SystemClock()
    first = clock.now_ns()
    if clock.now_ns() < first:
        return "broken", "CLOCK_BOOTTIME goes backwards", "Leases cannot be timed on this machine."
    if time.gmtime().tm_year < 2024:
        return "note", f"wall clock says {time.strftime('%Y-%m-%d')}", "Set it: bills and records carry its time."
    return "ok", f"CLOCK_BOOTTIME counts, machine up for {seconds(first // 10**9)}"


def _check_home() -> tuple[str, str] | tuple[str, str, str]:
    home = home_dir()
    if not home.exists():
        parent = next(folder for folder in home.parents if folder.exists())
        if not os.access(parent, os.W_OK | os.X_OK):
            return "broken", f"{home} does not exist, and {parent} is not yours to write", _HOME_DO
        return "ok", f"{home} (made when an office first starts)"
    found = home.stat()
    if not stat.S_ISDIR(found.st_mode):
        return "broken", f"{home} is not a folder", _HOME_DO
    if found.st_uid != os.getuid():
        return "broken", f"{home} belongs to uid {found.st_uid}, not to you", _HOME_DO
    if stat.S_IMODE(found.st_mode) & 0o022:
        return "broken", f"others may write into {home}", f"Take that right away: chmod go-w {home}"
    if not os.access(home, os.W_OK | os.X_OK):
        return "broken", f"{home} cannot be written", f"Fix its permissions: chmod u+rwx {home}"
    return "ok", f"{home}, mode {stat.S_IMODE(found.st_mode):04o}"


_HOME_DO: Final = "Set SUBLET_HOME to a folder of your own."


def _check_socket() -> tuple[str, str] | tuple[str, str, str]:
    """As a client looks before it sends anything."""
    path = socket_path(home_dir())
    try:
        if path.parent.exists():
            check_folder(os.fspath(path.parent))
        else:
            check_parents(os.fspath(path.parent), set())
    except InvalidRequest as error:
        return "broken", error.message, error.do
    return "ok", f"{path}: only you and root can put a socket there"


def _check_disk() -> tuple[str, str] | tuple[str, str, str]:
    """One small write, synced, where the journal is: an office answers nothing before such a write is through."""
    home = home_dir()
    folder = next((f for f in (home, *home.parents) if f.is_dir() and os.access(f, os.W_OK)), None)
    if folder is None:
        return "broken", f"there is no folder on the way to {home} that you may write", _HOME_DO
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(b"\0" * 4096)
            start = time.monotonic()
            os.fsync(file.fileno())
            took = time.monotonic() - start
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        what = "your quota is used up" if error.errno == errno.EDQUOT else "the disk is full"
        return "broken", f"{what} at {folder}: nothing can be written", _FULL_DO
    found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize
    text = f"{format_size(free)} free, a sync takes {took * 1000:.1f} ms"
    if free < DISK_FREE_MIN:
        return "note", text, "When the disk is full no new lease is granted: make room on it."
    if took > SYNC_SLOW_S:
        return "note", text, "Each grant waits for a sync: put SUBLET_HOME on a faster disk."
    return "ok", text


def _check_office() -> tuple[str, str] | tuple[str, str, str]:
    if sys.platform != "linux" and not os.environ.get("SUBLET_URL"):
        return "note", "no office here"
    try:
        view = CommandOffice.reach(start=False).get("/v1/status")
    except NoOffice as error:
        return "note", error.message, "The first lease starts one; so does `sublet up`."
    process = f"pid {view['pid']}, " if view["pid"] else ""
    return ("ok", f"answers: {process}for {seconds(round(view['uptime']))}, {plural(view['live'], 'live lease')}")


def _check_data_door() -> tuple[str, str] | tuple[str, str, str]:
    if sys.platform != "linux" and not os.environ.get("SUBLET_URL"):
        return "note", "no office here"
    office = CommandOffice.reach(start=False)
    try:
        office.get("/v1/hello")
    except NoOffice:
        return "note", "no office runs"
    if office.address.socket is None:
        return "note", "the office is on another machine"
    trouble = data_door_trouble(office.address)
    return ("ok", "answers") if trouble is None else ("broken", trouble.message, trouble.do or "")


def _check_background() -> tuple[str, str] | tuple[str, str, str]:
    """What has failed in background loops of the office and of its supervisor, as far as they answer."""
    if sys.platform != "linux" and not os.environ.get("SUBLET_URL"):
        return "note", "no office here"
    try:
        found = CommandOffice.reach(start=False).get("/v1/troubles")
    except NoOffice:
        return "note", "no office runs"
    except NotFound:
        return "note", "the office is older than this command, and does not tell"
    except Unauthorized:
        return "note", "the office tells this to operators only"
    if not found:
        return "ok", "nothing has failed since the office and its supervisor were started"
    failing = [one for one in found if one["failing"]]
    text = "; ".join(
        f"{one['part']} {one['loop']}: {plural(one['shortages'], 'shortage')}, {plural(one['errors'], 'error')}, "
        f"{'does not work now' if one['failing'] else 'works'} (last: {one['last']})"
        for one in failing or found
    )
    if any(one["errors"] for one in found):
        do = "See office.log and supervisor.log in the state folder, and report it."
    else:
        do = "Free file descriptors and memory, or raise the limits of the office (`ulimit -n`)."
    return "broken" if failing else "note", text, do


def _check_journal() -> tuple[str, str] | tuple[str, str, str]:
    """All that an office would start from, read as it would read it; a damaged or newer journal raises."""
    from sublet.office.journal.files import JOURNAL_NAME
    from sublet.office.journal.reader import JournalReader, check_header

    path = home_dir() / JOURNAL_NAME
    if not path.exists():
        return "ok", "none yet"
    check_header(path)
    reader = JournalReader(path)
    try:
        tip = reader.check()
    finally:
        reader.close()
    size = format_size(path.stat().st_size)
    return "ok", f"{path}, {size}, {plural(tip.seq, 'entry', 'entries')}, incarnation {tip.incarnation}"


def _checks() -> dict[str, Callable[[], tuple[str, str] | tuple[str, str, str]]]:
    """In the order in which they are shown."""
    from sublet.cli.doctor_devices import check_locks, check_machine, device_checks
    from sublet.cli.doctor_guests import guest_checks

    return {
        "platform": _check_platform,
        "Python": _check_python,
        "SQLite": _check_sqlite,
        "clock": _check_clock,
        "machine": check_machine,
        **device_checks(),
        "device locks": check_locks,
        **guest_checks(),
        "state folder": _check_home,
        "disk": _check_disk,
        "socket": _check_socket,
        "journal": _check_journal,
        "office": _check_office,
        "data door": _check_data_door,
        "background loops": _check_background,
    }
