"""``sublet session``: manages GPU work that outlives its leases. A notebook joins with ``SUBLET_SESSION``."""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final

from sublet.cli.declare import Arg, Opt, UsageError
from sublet.cli.exit_status import DONE
from sublet.cli.parsing import (
    FOREVER,
    AsJson,
    OrModel,
    PayPriority,
    count,
    duration,
    name,
    other_model,
    size,
    vram,
    wait,
)
from sublet.cli.show import Json, document, paint, seconds, table, visible
from sublet.errors import SubletError
from sublet.invocation import typeable, typed
from sublet.values import MIB, Exclusivity, Tier, format_size

if TYPE_CHECKING:
    from sublet.client.fabric import Fabric
    from sublet.client.lease import Lease
    from sublet.client.model import Place
    from sublet.studio import Session, Sessions

NONE: Final[Mapping[str, Any]] = MappingProxyType({})
SessionArg = Annotated[str, Arg("SESSION", help="Name or id of the session, from `sublet session ls`.")]
_Wait = Annotated[
    float,
    Opt("--wait", metavar="DURATION", parse=wait, help="Longest wait in the queue, 0 to try once (default: forever)."),
]
_SmallerOk = Annotated[bool, Opt("--smaller-ok", help="Accept less if no more is free.")]
_AtLeast = Annotated[
    int | None, Opt("--at-least", metavar="SIZE", parse=size, help="With --smaller-ok: least GPU memory to accept.")
]
_Now = Annotated[bool, Opt("--now", help="End what still runs in it.")]


def start(
    *,
    session: Annotated[str, Arg("NAME", parse=name, help="Name of the new session.")],
    gpu: Annotated[int, Opt("--vram", "--gpu", metavar="SIZE", parse=vram, help="GPU memory, such as 8GiB.")],
    gpus: Annotated[
        int, Opt("--gpus", metavar="N", parse=count, help="Number of GPUs, all on one machine (default: 1).")
    ] = 1,
    ttl: Annotated[
        float | None, Opt("--ttl", metavar="DURATION", parse=duration, help="Time to live of its leases (default: 5m).")
    ] = None,
    tier: Annotated[
        str, Opt("--tier", choices=[t.value for t in Tier], help="Scheduling tier (default: interactive).")
    ] = Tier.INTERACTIVE.value,
    pay_priority: PayPriority = False,
    exclusivity: Annotated[
        str | None,
        Opt("--exclusivity", choices=[e.value for e in Exclusivity], help="How the GPU is shared (default: session)."),
    ] = None,
    model: Annotated[str | None, Opt("--model", metavar="MODEL", help="GPU model to require.")] = None,
    smaller_ok: _SmallerOk = False,
    at_least: _AtLeast = None,
    or_model: OrModel = None,
    waiting: _Wait = FOREVER,
    later: Annotated[bool, Opt("--later", help="Ask for no lease now: the first cell does.")] = False,
    as_json: AsJson = False,
) -> int:
    """Start a session and acquire its first lease.

    Set SUBLET_SESSION to its name where the notebook's kernel starts. The lease lives on without this command, for its
    time to live; the first `%%gpu` cell takes it over.

    A request that can never be granted starts no session. Exit status 75: that, or the session is started and rests,
    since no lease was granted within the wait.
    """
    from sublet.studio import Terms
    from sublet.studio.sessions import resting_message

    less = _less(smaller_ok=smaller_ok, at_least=at_least, or_model=or_model)
    if gpu < MIB:
        raise UsageError("--vram is less than 1MiB", do="Give what the work needs on each GPU, such as --vram 8GiB.")
    if at_least is not None and at_least > gpu:
        raise UsageError("--at-least is more than --vram", do="Make it at most the same.")
    if or_model is not None and model is None:
        raise UsageError("--or-model needs --model as well", do="Say which is wanted: --model A100 --or-model any.")
    fabric, sessions = _reach()
    terms = Terms(
        vram=gpu,
        count=gpus,
        ttl_s=ttl,
        tier=tier,
        pay_priority=pay_priority,
        exclusivity=exclusivity,
        model=model,
        **less,
    )
    made = sessions.start(session, terms)
    if not later:
        try:
            _hold(fabric, sessions, made, waiting, as_json=as_json)
        except SubletError as error:
            sessions.note_first_refusal(made, error)
            raise
        except KeyboardInterrupt:  # the office was told that the request is withdrawn
            sys.stderr.write(f"\n{visible(typeable(resting_message(made)))}\n")
            raise
    return _print_result(
        fabric, sessions, made.id, f"Use it in a notebook: export SUBLET_SESSION={made.name}", as_json=as_json
    )


def resume(
    *,
    session: SessionArg,
    smaller_ok: _SmallerOk = False,
    at_least: _AtLeast = None,
    or_model: OrModel = None,
    waiting: _Wait = FOREVER,
    as_json: AsJson = False,
) -> int:
    """Acquire a lease for a session that rests.

    The lease lives on without this command, for its time to live; the next `%%gpu` cell takes it over.

    Exit status 75: no lease was granted within the wait.
    """
    less = _less(smaller_ok=smaller_ok, at_least=at_least, or_model=or_model)
    fabric, sessions = _reach()
    found = sessions.find(session)
    _hold(fabric, sessions, found, waiting, less, as_json=as_json)
    return _print_result(
        fabric, sessions, found.id, "The next %%gpu cell of its notebook runs at once.", as_json=as_json
    )


def accept(*, session: SessionArg, as_json: AsJson = False) -> int:
    """Accept the offer to a session: a smaller amount, or another model.

    `sublet session show` says what it is and until when it is open. The program that asks for the lease then takes it.
    """
    fabric, sessions = _reach()
    found = sessions.accept(session)
    return _print_result(fabric, sessions, found.id, "The offer is accepted, and is handed over.", as_json=as_json)


def decline(*, session: SessionArg, as_json: AsJson = False) -> int:
    """Decline the offer; the session goes on waiting for what it asked for."""
    fabric, sessions = _reach()
    found = sessions.decline(session)
    return _print_result(fabric, sessions, found.id, "It waits for what it asked for.", as_json=as_json)


def rest(*, session: SessionArg, now: _Now = False, as_json: AsJson = False) -> int:
    """Release the lease of a session, or leave the queue. Saved state is kept."""
    fabric, sessions = _reach()
    found = sessions.rest(session, even_if_busy=now)
    return _print_result(
        fabric, sessions, found.id, f"Go on: {typed('sublet session resume')} {found.name}", as_json=as_json
    )


def end(*, session: SessionArg, now: _Now = False, as_json: AsJson = False) -> int:
    """End a session: it gets no further lease. Its volume is kept as other volumes are."""
    fabric, sessions = _reach()
    found = sessions.end(session, even_if_busy=now)
    hint = f"What it saved is in its volume: {typed('sublet volume show')} {found.volume}"
    if all(one.name != found.volume for one in fabric.volumes()):
        hint = "It saved nothing: it has no volume."
    return _print_result(fabric, sessions, found.id, hint, as_json=as_json)


def ls(
    *,
    everything: Annotated[bool, Opt("--all", help="Include sessions that have ended.")] = False,
    as_json: AsJson = False,
) -> int:
    """List sessions."""
    from sublet.studio import are_recorded
    from sublet.studio.views import session_views

    views: list[Json] = []
    if are_recorded():
        fabric, sessions = _reach()
        views = session_views(fabric, [one for one in sessions.reconcile() if everything or not one.is_over])
    if as_json:
        document(views)
        return DONE
    if not views:
        print("No sessions.")
        print(f"  Start one: {typed('sublet session start')} NAME --vram 8GiB")
        return DONE
    heads = ["SESSION", "STATE", "WHAT", "WHERE", "LEFT", "LEASES", "SAVED"]
    print(table(heads, [_row(view) for view in views]))
    return DONE


def show(*, session: SessionArg, as_json: AsJson = False) -> int:
    """Show one session in full, with its leases."""
    from sublet.studio.views import (
        CELL_HEADS,
        cell_row,
        last_saved,
        offer_facts,
        place,
        refusal,
        session_views,
        state,
        the_bill,
    )

    fabric, sessions = _reach()
    view = session_views(fabric, [_reconciled(sessions, session)])[0]
    if as_json:
        document(view)
        return DONE
    facts = [
        ("session", view["name"]),
        ("id", view["id"]),
        ("state", state(view)),
        *([("queue", place(view))] if view["position"] else []),
        *(offer_facts(view["offer"]) if view["offer"] else []),
        *([("last asked", refusal(view["reason"]))] if view["reason"] and not view["position"] else []),
        ("asks for", f"{_what(view)}{', pays for priority' if view['terms']['pay_priority'] else ''}"),
        *([("person", view["person"])] if view["person"] else []),
        ("tenant", view["tenant"] or "-"),
        ("started at", view["started_at"]),
        ("last activity", view["active_at"]),
        ("volume", view["volume"]),
        ("saved", last_saved(view) or "-"),
        *([("bill", the_bill(view["bill"]))] if view["bill"] else []),
    ]
    width = max(len(fact) for fact, _ in facts)
    for fact, value in facts:
        print(f"{paint(fact.ljust(width), 'dim')}  {visible(str(value))}")
    if view["leases"]:
        rows = [
            [one["id"], ", ".join(one["devices"]) or "-", one["from"], one["until"] or "-", one["reason"] or "held"]
            for one in view["leases"]
        ]
        print()
        print(table(["LEASE", "WHERE", "FROM", "UNTIL", "END"], rows))
    if view["cells"]:
        print()
        print(table([head.upper() for head in CELL_HEADS], [list(cell_row(cell)) for cell in view["cells"]]))
    return DONE


def bill(
    *,
    session: SessionArg,
    as_csv: Annotated[bool, Opt("--csv", help="Print comma-separated values with a header line.")] = False,
    as_json: AsJson = False,
) -> int:
    """Show the bill of a session, a line for each cell.

    The bill of a lease is divided among its cells by the time that each of them held it, and one more line has the time
    without a cell. The lines add up to the session's line of `sublet bill --by session`. What a cell did (launches,
    errors, bytes) is what its notebook measured.
    """
    from msgspec import to_builtins

    from sublet.studio.cell_bill import CellLine
    from sublet.studio.session_bill import bill_heads, bill_lines, bill_row, sum_row

    if as_csv and as_json:
        raise UsageError("--csv and --json contradict each other", do="Give one of them.")
    fabric, sessions = _reach()
    found = _reconciled(sessions, session)
    own = [entry for entry in sessions.entries(0) if entry.session == found.id]
    cells, total = bill_lines(fabric, found, own, time.time_ns())
    lines = [one.document() for one in cells]
    if as_json:
        document(lines)
    elif as_csv:
        writer = csv.DictWriter(sys.stdout, list(CellLine(session="", name="").document()), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    elif total is None:
        print("Nothing was held by this session.")
    else:
        rows = [*map(bill_row, lines), sum_row(to_builtins(total))]
        print(table([head.upper() for head in bill_heads(total.currency)], [list(row) for row in rows]))
    return DONE


def explain(*, session: SessionArg, as_json: AsJson = False) -> int:
    """Explain why a session waits or rests, or what may end its lease."""
    from sublet.studio.views import advice, refusal, session_views, state

    fabric, sessions = _reach()
    found = _reconciled(sessions, session)
    view = session_views(fabric, [found])[0]
    if view["lease"] is not None:
        from sublet.cli.lease import explain as explain_lease

        return explain_lease(lease=view["lease"], as_json=as_json)
    if as_json:
        document(view)
        return DONE
    print(visible(f"Session {found.name} is {state(view)}."))
    last = found.lease
    if last is not None and last.reason:
        why = f"{last.reason}: {last.detail}" if last.detail else last.reason
        print(visible(f"  last lease  {last.id} ended at {_moment(last.ended_ns)} ({why})"))
    if found.refused:
        print(visible(f"  last asked  {refusal(found.refused)}"))
    if can := advice(view):
        print(f"  you can     {visible(typeable(can))}")
    return DONE


# ---- within


def _reach() -> tuple[Fabric, Sessions[Lease]]:
    from sublet.client.fabric import connect
    from sublet.studio import FabricOffice, open_sessions

    fabric = connect()
    return fabric, open_sessions(FabricOffice(fabric), name="sublet session")


def _reconciled(sessions: Sessions[Lease], session: str) -> Session:
    found = sessions.find(session)
    sessions.reconcile()
    return sessions.find(found.id)


def _less(*, smaller_ok: bool, at_least: int | None, or_model: str | None) -> dict[str, Any]:
    """What may be offered in the place of what is asked for, as the options say it."""
    if at_least is not None and not smaller_ok:
        raise UsageError("--at-least needs --smaller-ok", do="Give both, or neither.")
    less: dict[str, Any] = {"or_smaller": at_least or True} if smaller_ok else {}
    return less if or_model is None else less | {"or_model": other_model(or_model)}


def _hold(
    fabric: Fabric,
    sessions: Sessions[Lease],
    session: Session,
    waiting: float,
    less: Mapping[str, Any] = NONE,
    *,
    as_json: bool,
) -> None:
    """Acquire its lease, and leave it to the notebook that takes it over."""
    from sublet.cli.acquire import offered, position_text
    from sublet.cli.progress_line import LiveLine
    from sublet.notebook.resume import estimate_error_s
    from sublet.studio.office import offer_of

    def placed(place: Place) -> None:
        line.set(position_text(place, None if place.estimate is None else estimate_error_s(fabric)))

    with LiveLine() as line:
        more: dict[str, Any] = {"wait": waiting, **less}
        if line.live or not as_json:
            more["on_place"] = placed
        held = sessions.acquire(session.id, more, lambda offer: offered(line, offer_of(offer)))
    sessions.set_down(session.id, held)


def _print_result(fabric: Fabric, sessions: Sessions[Lease], ident: str, hint: str, *, as_json: bool) -> int:
    from sublet.studio.views import session_views, state

    view = session_views(fabric, [sessions.find(ident)])[0]
    if as_json:
        document(view)
        return DONE
    print(visible(f"Session {view['name']} is {state(view)}."))
    print(f"  {hint}")
    return DONE


def _row(view: Json) -> list[str]:
    from sublet.studio.views import state

    holds = view["leases"][-1] if view["leases"] and view["lease"] else None
    return [
        view["name"],
        state(view),
        _what(view),
        ", ".join(holds["devices"]) if holds else "-",
        seconds(view["remaining"]),
        str(len(view["leases"])),
        view["saved_at"] or "-",
    ]


def _what(view: Json) -> str:
    terms = view["terms"]
    many = terms["count"]
    return f"{many} × {format_size(terms['vram'])} gpu" if many > 1 else f"{format_size(terms['vram'])} gpu"


def _moment(wall_ns: int | None) -> str:
    from sublet.lease.value import rfc3339

    return "" if wall_ns is None else rfc3339(wall_ns)
