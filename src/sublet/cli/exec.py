"""``sublet exec``: runs one more command under an existing lease."""

from __future__ import annotations

from typing import Annotated

from sublet.cli.command_lease import token_of
from sublet.cli.declare import Arg
from sublet.cli.direct_request import Direct
from sublet.cli.exit_status import ENDED, print_error
from sublet.cli.guest_command import (
    CommandNotStarted,
    CommandWords,
    Env,
    Grace,
    GuestName,
    NoTty,
    Tty,
    spec_of,
    start,
    wants_terminal,
    with_what_was_lost,
)
from sublet.cli.messages import message, read
from sublet.cli.show import visible
from sublet.errors import NotFound, SubletError


def exec_(
    *,
    lease: Annotated[str, Arg("LEASE|GUEST", help="Id of a lease, or of a guest that runs under it.")],
    env: Env = [],  # noqa: B006 - never changed; both parsers make their own
    name: GuestName = None,
    grace: Grace = None,
    tty: Tty = False,
    no_tty: NoTty = False,
    command: CommandWords,
) -> int:
    """Run another command under a lease that is held already.

    It uses the lease's devices and ends with the lease, which it neither renews nor releases.

    Exit status: the command's own (128 + n if signal n ended it), 126 or 127 if it could not be run or found, 76 if the
    lease ended under it.
    """
    terminal = wants_terminal(tty, no_tty)
    words = command[1:] if command[:1] == ["--"] else command
    direct = Direct.reach(start=False)
    lease_id = _lease_of(direct, lease) if lease.startswith("g-") else lease
    view = direct.ask("GET", f"/v1/leases/{lease_id}") if lease_id.replace("-", "").isalnum() else None
    if view is None:
        raise NotFound(f"there is no lease {visible(lease_id)}", do="See `sublet lease ls`.")
    token = token_of(direct, lease_id)
    direct.close()
    spec = spec_of(words, tenant=view["lease"]["tenant"], env=env, name=name, grace=grace, terminal=terminal)
    on_host = any(part["kind"] == "gpu" and part["host"] for part in view["lease"]["parts"])
    try:
        conversation, attendance = start(direct, token, spec, on_host=on_host)
    except CommandNotStarted as failed:
        print_error(failed, as_json=False)
        return failed.exit_code
    with conversation:
        attendance.run()
    if attendance.lost is not None:
        print_error(attendance.lost, as_json=False)
        return ENDED
    code = with_what_was_lost(attendance, 0 if attendance.exit_code is None else attendance.exit_code)
    return ENDED if _lease_is_over(direct, lease_id, attendance.reason) else code


def _lease_of(direct: Direct, guest: str) -> str:
    with direct.connect_data() as conversation:
        found = read(conversation.call(message("ListGuests", guest=guest, ended=True)).body)["guests"]
    if not found:
        raise NotFound(f"there is no guest {visible(guest)}", do="`sublet ps --all` lists them.")
    return str(found[0]["lease"])


def _lease_is_over(direct: Direct, lease: str, reason: str | None) -> bool:
    """Whether the command was ended by the end of its lease. Without an answer the reason is all there is."""
    if reason in (None, "out_of_memory"):
        return False
    try:
        return direct.ask("GET", f"/v1/leases/{lease}")["lease"]["end"] is not None
    except SubletError:
        return True
    finally:
        direct.close()
