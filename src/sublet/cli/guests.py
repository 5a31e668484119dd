"""``sublet ps``, ``logs`` and ``stop``: lists guests, shows their output, ends them."""

from __future__ import annotations

import time
from typing import Annotated, Any, Final

from sublet.cli.attach import Attendance
from sublet.cli.declare import Arg, Opt, UsageError
from sublet.cli.direct_request import Direct
from sublet.cli.exit_status import DONE, FAILED
from sublet.cli.guest_command import with_what_was_lost
from sublet.cli.messages import Json, message, read
from sublet.cli.parsing import AsJson, duration
from sublet.cli.show import document, seconds, table, visible
from sublet.client.home import home_text
from sublet.errors import Disconnected, InvalidRequest
from sublet.invocation import typeable, typed
from sublet.values import NS_PER_S, format_size
from sublet.wire.conversation import Conversation

GuestArg = Annotated[str, Arg("GUEST", help="Id of the guest, from `sublet ps`.")]
GONE_PATIENCE_S: Final = 10.0
"""How long after the grace the end of a guest is awaited before it is said that it has not come."""


def _offset(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 18:
        raise InvalidRequest(f"{text[:40]!r} is not a number of bytes", do="Write a whole number, such as 4096.")
    return int(text)


def ps(
    *,
    everything: Annotated[
        bool, Opt("--all", help="Include guests that have ended and whose output is still kept.")
    ] = False,
    lease: Annotated[str | None, Opt("--lease", metavar="LEASE", help="Only guests of this lease.")] = None,
    as_json: AsJson = False,
) -> int:
    """List the guests: commands that run under leases.

    A guest is a command with all processes that it started. It is listed until the last of them has ended.
    """
    try:
        with _connected() as conversation:
            found = _listed(conversation, lease=lease or "", ended=everything)
    except Disconnected as error:
        from sublet.cli.call import NoOffice, check_nothing_lives

        if not isinstance(error, NoOffice):
            raise
        check_nothing_lives(home_text())
        found = []
    if as_json:
        document([_shown(guest) for guest in found])
        return DONE
    if not found:
        print("No guests." if everything else "No guests: nothing runs under a lease.")
        print(f"  Run a command: {typed('sublet run --gpu 1GiB -- COMMAND')}")
        return DONE
    heads = ["GUEST", "LEASE", "STATE", "PID", "CPU", "MEMORY", "SINCE", "NAME", "COMMAND"]
    print(table(heads, [_row(guest) for guest in found], right=["PID", "CPU", "MEMORY"]))
    return DONE


def logs(
    *,
    guest: GuestArg,
    follow: Annotated[bool, Opt("--follow", "-f", help="Follow the output until the guest ends.")] = False,
    offset: Annotated[int, Opt("--offset", metavar="N", parse=_offset, help="Number of bytes to skip.")] = 0,
) -> int:
    """Print the output of a guest, from the beginning.

    At least the newest 12 MiB are kept while it runs and for a while afterwards; a gap is reported on stderr. Its
    stdout goes to stdout, its stderr to stderr.
    """
    with _connected() as conversation:
        attendance = Attendance(conversation, guest, stdin=False)
        attendance.is_onlooker = True
        attendance.attach(offset=offset, follow=follow, lossless=False)
        attendance.run()
    if attendance.lost is not None:
        raise attendance.lost
    return 130 if attendance.wants_end else with_what_was_lost(attendance, DONE)


def stop(
    *,
    guest: GuestArg,
    grace: Annotated[
        float | None,
        Opt(
            "--grace",
            metavar="DURATION",
            parse=duration,
            help="Time before SIGKILL (default: the guest's own, else 5s).",
        ),
    ] = None,
    now: Annotated[bool, Opt("--now", help="Kill at once, without SIGTERM.")] = False,
    as_json: AsJson = False,
) -> int:
    """Stop a guest with all its processes. Its lease stays.

    They are sent SIGTERM, and after the grace SIGKILL.
    """
    if now and grace is not None:
        raise UsageError("--now and --grace contradict each other", do="Give one of them.")
    grace_ns = 0 if now else -1 if grace is None else round(grace * NS_PER_S)
    with _connected() as conversation:
        view = _fetch_guest(conversation, guest)
        if view["state"] != "gone":
            conversation.call(message("EndGuest", guest=guest, grace_ns=grace_ns))
            view = _when_gone(conversation, guest, (60.0 if grace is None else grace) + GONE_PATIENCE_S)
    if as_json:
        document(_shown(view))
    elif view["state"] == "gone":
        print(f"Guest {visible(guest)} is gone: exit status {view['exit_code']}.")
    else:
        still = f"Guest {visible(guest)} is still there: {view['processes']} processes. `sublet ps` shows it."
        print(typeable(still))
    return DONE if view["state"] == "gone" else FAILED


def _connected() -> Conversation:
    """Connected as the owner of this machine's office, or as the tenant of our token."""
    direct = Direct.reach(start=False)
    direct.close()
    return direct.connect_data()


def _listed(conversation: Conversation, *, lease: str, ended: bool) -> list[Json]:
    found: list[Json] = []
    after = 0
    while True:
        page = read(conversation.call(message("ListGuests", lease=lease, ended=ended, after=after)).body)
        found += page["guests"]
        after = page.get("more", 0)
        if not after:
            return found


def _fetch_guest(conversation: Conversation, guest: str) -> Json:
    found = read(conversation.call(message("ListGuests", guest=guest, ended=True)).body)["guests"]
    if not found:
        from sublet.errors import NotFound

        raise NotFound(f"there is no guest {visible(guest)}", do="`sublet ps --all` lists them.")
    view: Json = found[0]
    return view


def _when_gone(conversation: Conversation, guest: str, patience_s: float) -> Json:
    until_s, pause_s = time.monotonic() + patience_s, 0.005
    while (view := _fetch_guest(conversation, guest))["state"] != "gone" and time.monotonic() < until_s:
        time.sleep(pause_s)
        pause_s = min(0.1, pause_s * 1.5)
    return view


def _shown(view: Json) -> dict[str, Any]:
    """In the units of every document: bytes, seconds, and times in UTC."""
    return {
        **{key: view[key] for key in ("id", "lease", "epoch", "tenant", "name", "argv", "profile", "state", "pid")},
        "processes": view["processes"],
        "started_at": _time(view["started_at"]),
        "ended_at": _time(view["ended_at"]),
        "exit_code": None if view["exit_code"] < 0 else view["exit_code"],
        "reason": view["reason"] or None,
        "cpu": view["cpu_ns"] / NS_PER_S,
        "peak_bytes": view["peak_bytes"],
        "log_bytes": view["log_bytes"],
        "log_dropped": view["log_dropped"],
    }


def _time(wall_ns: int) -> str | None:
    if not wall_ns:
        return None
    whole, rest = divmod(wall_ns // 1_000_000, 1000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(whole))}.{rest:03d}Z"


def _row(view: Json) -> list[str]:
    end_ns = view["ended_at"] or time.time_ns()
    return [
        view["id"],
        view["lease"],
        _state(view),
        str(view["pid"]),
        seconds(round(view["cpu_ns"] / NS_PER_S, 2)),
        format_size(view["peak_bytes"]) if view["peak_bytes"] else "-",
        seconds(max(0, (end_ns - view["started_at"]) // NS_PER_S)),
        view["name"] or "-",
        " ".join(view["argv"])[:80],
    ]


def _state(view: Json) -> str:
    text = str(view["state"])
    if view["exit_code"] >= 0:
        text += f", exit {view['exit_code']}"
    return f"{text}: {view['reason']}" if view["reason"] else text
