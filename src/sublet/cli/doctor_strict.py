"""``sublet doctor --strict``: whether this machine is safe for tenants who do not trust one another.

What is only worth knowing on one's own machine is broken there: ``NEEDED`` names the findings of the ordinary checks,
and why; ``strict_checks`` adds what only those need.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

from sublet.client.home import home_dir
from sublet.values import format_size

Check = Callable[[], tuple[str, str] | tuple[str, str, str]]

NEEDED: Final[dict[str, str]] = {
    "guests: ending a guest as a whole": "a guest that forks away would outlive its lease",
    "guests: memory": "one tenant could take the memory of all",
    "guests: pids": "one tenant could take all process numbers",
    "guests: cpu": "one tenant could take all cores",
    "leases: size of folders": "one tenant could fill the disk of all",
    "leases: size of memory segments": "tenants' guests would have none",
    "tenants: uid": "tenants' guests would run with your own user number",
    "tenants: pid": "tenants would see one another's processes",
    "tenants: ipc": "tenants would share memory and message queues",
    "tenants: mount": "tenants would see this machine's files",
    "tenants: proc": "tenants would see one another's processes",
    "tenants: net": "tenants would reach this machine's network",
    "tenants: seccomp": "tenants would reach every system call of the kernel",
    "tenants: no_new_privs": "tenants could gain rights through programs that are setuid",
    "disk": "a full disk stops new leases, and slow syncs every request",
}
"""Findings that must be ``ok`` here, and what happens where they are not."""

_F = TypeVar("_F")


def strict_checks() -> dict[str, Check]:
    """What is asked with ``--strict`` alone, in the order in which it is shown."""
    return {
        "strict: office of root": _check_root,
        "strict: program files": _check_program_files,
        "strict: HOME": _check_home_of_root,
        "strict: state folder's parents": _check_parents,
        "strict: environment": _check_environment,
        "strict: reserve of the journal": _check_reserve,
        "strict: limits of tenants": _check_limits,
        "strict: running program": _check_running,
    }


def judged(findings: Iterable[tuple[str, str, str, str]], make: Callable[..., _F]) -> list[_F]:
    """The findings as several tenants have to take them: what they need and is not ``ok`` is broken."""
    found = []
    for subject, state, text, do in findings:
        why = NEEDED.get(subject)
        if state == "note" and why is not None:
            state, text = "broken", f"{text}; {why}"
        found.append(make(subject, state, text, do))
    return found


def _check_running() -> tuple[str, str] | tuple[str, str, str]:
    """Guests are walled in by the supervisor that runs, which outlives an office and so an upgrade."""
    from sublet.client.home import runtime_dir
    from sublet.node.agent.starting import package_folder
    from sublet.node.processes.procs import Procs
    from sublet.wire.sockets import peer_of
    from sublet.wire.unix import connect

    try:
        with connect(str(runtime_dir(home_dir()) / "supervisor.sock"), timeout_s=5.0) as sock:
            pid = peer_of(sock).pid
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            arguments = [os.fsdecode(one) for one in file.read().split(b"\0")]
    except OSError:
        return "ok", "no supervisor runs"
    ours, identity = package_folder(), Procs().identity(pid)
    if identity is None:
        return "ok", "no supervisor runs"
    ran_s = time.clock_gettime(time.CLOCK_BOOTTIME) - identity.start_ticks / os.sysconf("SC_CLK_TCK")
    changed_s = time.time() - max(
        os.stat(os.path.join(folder, name)).st_ctime
        for folder, _, names in os.walk(os.path.join(ours, "sublet"))
        for name in names
        if name.endswith(".py")
    )
    if ours in arguments and changed_s >= ran_s:
        return "ok", f"the supervisor (pid {pid}) is of the program as it is now"
    return (
        "broken",
        f"the supervisor (pid {pid}) was started by an earlier program: guests are walled in as that one did it",
        "End it with `sublet down` (`--drain` lets leases end first); the next command starts the present one.",
    )


def _check_root() -> tuple[str, str] | tuple[str, str, str]:
    from sublet.wire.program_files import is_root

    if is_root():
        return "ok", "root's: each tenant's guests have a user number of their own"
    return (
        "broken",
        "this user is not root of the machine: what its office starts for tenants has no user numbers of their own",
        "Run the office as root, from an installation of root's.",
    )


def _check_program_files() -> tuple[str, str] | tuple[str, str, str]:
    from sublet.wire.program_files import changeable, program_files

    seen: set[str] = set()
    for path in program_files():
        if why := changeable(path, seen):
            do = "Install where only root can write (`python3 -m venv /opt/sublet`), or take what is there over: "
            return (
                "broken",
                f"another user can change what the office runs: {why}",
                f"{do}`chown -R root:root` and `chmod -R go-w`.",
            )
    return "ok", f"{sys.executable}, its libraries and this package can be changed by root alone"


def _check_home_of_root() -> tuple[str, str] | tuple[str, str, str]:
    home = os.environ.get("HOME", "")
    try:
        owner = os.stat(home).st_uid
    except OSError:
        return "ok", "there is none"
    if owner not in (0, os.geteuid()):
        return "broken", f"{home} belongs to uid {owner}", "Use `sudo -H`, so that HOME is root's own."
    return "ok", f"{home} is your own"


def _check_parents() -> tuple[str, str] | tuple[str, str, str]:
    from sublet.wire.unix import replaceable

    home = os.fspath(home_dir())
    if why := replaceable(home, set()):
        return "broken", f"{home} {why}", "Set SUBLET_HOME to a folder of root's, such as /var/lib/sublet."
    return "ok", f"only you and root can put another folder into the place of {home}"


def _check_limits() -> tuple[str, str] | tuple[str, str, str]:
    """Of the file as the next office reads it: a mistake there raises, and is broken with its line."""
    from sublet.office.policy_file import FILE, KEYS, PolicyLimits, parse_policy

    path = home_dir() / FILE
    limits = parse_policy(path.read_text(encoding="utf-8"), str(path)) if path.exists() else PolicyLimits()
    tenants = [name for name, key in KEYS.items() if key.table == "tenant"]
    free = [name for name in tenants if limits.value(name) is None]
    if limits.number("lease.allow_missing"):
        walls = KEYS["lease.allow_missing"].shown(limits.number("lease.allow_missing"))
        return "broken", f"{path} lets tenants' guests do without {walls}", "Take allow_missing out of it."
    for tenant, office in (("tenant.leases", "office.leases"), ("tenant.queue", "office.queue")):
        own, most = limits.number(tenant), limits.number(office)
        if own > most // 2:
            return (
                "broken",
                f"one tenant may have {own} of the {most} that {office} allows all",
                f"Set {tenant} to less than half of that in {path}, then `sublet policy apply`.",
            )
    text = f"{len(tenants) - len(free)} hold for a tenant without any of its own (`sublet policy show`)"
    return "ok", text + (f"; none for {', '.join(free)}: one may have all that is free" if free else "")


def _check_reserve() -> tuple[str, str] | tuple[str, str, str]:
    """As an office lays it out when it starts, and every ten seconds after that."""
    from sublet.wire.disk import RESERVE_FILE, disk_reserve, space_of

    home = home_dir()
    folder = next(path for path in (home, *home.parents) if path.is_dir())
    space, file = space_of(folder), home / RESERVE_FILE
    reserve = disk_reserve(space.size)
    withheld = f"{format_size(reserve.withheld)} of {format_size(space.size)} are never lent"
    if file.exists() and file.stat().st_size == reserve.file:
        return "ok", f"{format_size(reserve.file)} lie in {file}; {withheld}"
    needed = reserve.file + 2 * reserve.short
    if space.free < needed:
        left = f"{format_size(space.free)} of the {format_size(needed)} it takes are free on the disk of {folder}"
        return (
            "broken",
            f"there is no room for it: {left}, and a full disk would stop the journal",
            "Remove files there, or set SUBLET_HOME to a folder on a larger disk.",
        )
    with tempfile.TemporaryFile(dir=folder) as trial:
        os.posix_fallocate(trial.fileno(), 0, 4096)
    return "ok", f"there is room for the {format_size(reserve.file)} that an office lays out; {withheld}"


def _check_environment() -> tuple[str, str] | tuple[str, str, str]:
    from sublet.wire.program_files import environment_for_root

    env = dict(os.environ)
    dropped = sorted(name for name, value in env.items() if environment_for_root({name: value}).get(name) != value)
    if dropped:
        return (
            "note",
            f"root's office does not take over {', '.join(dropped)} as it is: what it names, others could change",
            f"Take it away where the office is started: unset {' '.join(dropped)}.",
        )
    return "ok", "nothing in it loads code that others can change"
