"""Renders the studio's pages. One function makes elements, and escapes everything that comes from outside."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import Final

from sublet.errors import SubletError
from sublet.lazy_dataclass import dataclass
from sublet.lease.value import rfc3339
from sublet.studio.people import Person, Token
from sublet.studio.session_bill import bill_heads, bill_row, sum_row
from sublet.studio.views import (
    CELL_HEADS,
    Json,
    about,
    cell_row,
    last_saved,
    offer_facts,
    place,
    refusal,
    state,
    the_bill,
)
from sublet.values import format_size

TITLE: Final = "Sublet studio"
EMPTY: Final = frozenset(("meta", "link", "input"))
"""Elements without an end tag."""
ENDED_SHOWN: Final = 20
_PATHS: Final = frozenset(("action", "data_live", "href", "src"))
"""Attributes that may name a place of the studio."""
_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})
PREFIX: Final[ContextVar[str]] = ContextVar("prefix", default="")
"""Under which path the browser reaches the studio in this request: that of a proxy, or none."""


def at(path: str) -> str:
    """A place of the studio, as the browser of this request knows it."""
    return PREFIX.get() + path


class Html(str):
    """Text that is HTML already; a plain ``str`` is escaped when it becomes part of an element."""

    __slots__ = ()


def tag(element: str, *children: str, **attributes: str) -> Html:
    """One element. ``class_`` and ``for_`` stand for the words that Python keeps; an empty value is left out."""
    rendered = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{html.escape(at(value) if name in _PATHS else value)}"'
        for name, value in attributes.items()
        if value
    )
    if element in EMPTY:
        return Html(f"<{element}{rendered}>")
    inner = "".join(child if isinstance(child, Html) else html.escape(child) for child in children)
    return Html(f"<{element}{rendered}>{inner}</{element}>")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectView:
    """How a person's programs come to the office and to the studio."""

    office_url: str
    """Empty where other users of the machine cannot reach the office."""
    studio_url: str
    uid: int | None
    """The user of the machine who alone may be the person's tenant."""
    needs_token: bool
    """Whether that user, or any other, shows the tenant's access token."""
    is_owner: bool
    """The person is the owner of the office, who needs none of it."""
    tokens: Sequence[Token]


def sessions_page(token: Token, views: Sequence[Json], form: str, connect: ConnectView) -> str:
    """The page of the person who shows this token, as far as that opens it. ``form`` is the token of its forms."""
    person, part = token.person, sessions_part(token, views, form)
    if token.scope.session is not None:
        return live_page(person, form, part, live="/live")
    courses = [(f"Course {group}", f"/course/{group}") for group in person.teaches]
    links = [*((("Office", "/office"),) if person.is_operator else ()), *courses]
    more = (_start_form(form), _connect_part(connect, form))
    return live_page(person, form, part, *more, live="/live", links=links)


def sessions_part(token: Token, views: Sequence[Json], form: str) -> str:
    """What of the page changes by itself."""
    live = [view for view in views if not view["end"]]
    ended = [view for view in views if view["end"]][:ENDED_SHOWN]
    parts: list[str] = [tag("h2", "Sessions")]
    if token.scope.session is not None:
        parts.append(tag("p", f"You signed in with a token of session {token.scope.session} alone.", class_="dim"))
    elif not live:
        parts.append(tag("p", "No sessions. Start one below: it waits for a GPU if none is free.", class_="none"))
    parts += [_card(view, form, may_change=not token.scope.read_only) for view in live]
    if ended:
        rows = [_ended_row(view) for view in ended]
        heads = tag("tr", *(tag("th", head, scope="col") for head in ("Session", "Started", "Volume", "Bill")))
        body = tag("table", tag("thead", heads), tag("tbody", *rows))
        parts.append(_details("ended", f"Ended ({len(ended)})", body))
    return "".join(parts)


def bill_page(person: Person, form: str, bill: Json) -> str:
    """The bill of one session, a line for each cell."""
    back = tag("p", tag("a", "Back to your sessions", href="/"))
    total, parts = bill["total"], list[str]()
    if total is None:
        parts.append(tag("p", "Nothing was held by this session, so it has cost nothing.", class_="none"))
    else:
        heads = tag("tr", *(tag("th", text, scope="col") for text in bill_heads(total["currency"])))
        rows = (_bill_row(bill_row(line), class_="" if line["cell"] is None else "cell") for line in bill["lines"])
        table = tag("table", tag("thead", heads), tag("tbody", *rows), tag("tfoot", _bill_row(sum_row(total))))
        parts.append(tag("p", the_bill(total)))
        parts.append(tag("article", tag("div", table, class_="wide", tabindex="0"), *_bill_pages(bill), class_="bill"))
        parts.append(tag("p", "Outside of cells is the time of a lease in which none ran.", class_="dim"))
    as_of = tag("p", f"As of {bill['until'][:10]} {bill['until'][11:19]} UTC", class_="dim")
    title = tag("h2", f"Bill of {bill['name']}")
    main = tag("main", title, as_of, *parts, back)
    return whole_page(header(person, form), main, title=f"Bill of {bill['name']}", broad=True)


def _bill_row(cells: Sequence[str], **more: str) -> Html:
    name, *rest = cells
    return tag("tr", tag("th", name, scope="row"), *(tag("td", cell) for cell in rest), **more)


def _bill_pages(bill: Json) -> list[Html]:
    """Which lines these are, where they are not all."""
    path, before, shown = f"/sessions/{bill['session']}/bill", bill["before"], len(bill["lines"])
    if shown == bill["count"]:
        return []
    first = (tag("a", "First lines, as of now", href=path),) if before else ()
    following = (tag("a", "Next lines", href=f"{path}?after={bill['next']}"),) if bill["next"] else ()
    range_shown = f"Lines {before + 1} to {before + shown} of {bill['count']}" if shown else "No more lines"
    return [tag("p", tag("span", range_shown), *first, *following, class_="pages")]


def sign_in_page(error: SubletError | None = None) -> str:
    """Asks for the token."""
    hint = ("The operator of this studio has it for you, or an invite whose link shows it to you, once.",)
    return _asking("/sign-in", "token", "Your token", "Sign in", hint, error)


def signed_in_page(path: str) -> str:
    """Goes on to this page. A redirect would not do: it would be a part of the way from the hub's page of sign-in,
    which may be another site's, and then browsers would not send the cookie."""
    main = tag("main", tag("p", tag("a", "You are signed in. Go on", href=path)))
    return whole_page(tag("header", tag("h1", TITLE)), main, onward=path)


def join_page(error: SubletError | None = None) -> str:
    """Asks for the invite, which the script finds behind the ``#`` of the link."""
    hint = ("It is good once. You then get a token of your own. ", tag("a", "Sign in with a token", href="/sign-in"))
    return _asking("/join", "invite", "Your invite", "Join", hint, error, script="/join.js")


def joined_page(person: Person, token: str, connect: ConnectView | None = None) -> str:
    """Shows a new person the token, this once. ``connect``: how to connect, where the office says it."""
    return whole_page(
        tag("header", tag("h1", TITLE)),
        tag(
            "main",
            tag("h2", f"Welcome, {person.name}"),
            tag("p", "This is your token, shown this once. Keep it where you keep passwords:"),
            tag("p", tag("code", token), class_="token"),
            tag("p", "A notebook or a shell takes part with it:", class_="dim"),
            *_exports(connect, token),
            tag("p", tag("a", "Go to your sessions", href="/")),
        ),
    )


def token_page(person: Person, form: str, label: str, token: str, connect: ConnectView) -> str:
    """Shows a new token of a person, this once."""
    main = tag(
        "main",
        tag("h2", f"Your new token, {label}"),
        tag("p", "It is shown this once. In the shell that starts your notebook:"),
        *_exports(connect, token),
        tag("p", tag("a", "Back to your sessions", href="/")),
    )
    return whole_page(header(person, form), main)


def error_page(error: SubletError) -> str:
    """What went wrong and what to do."""
    back = tag("p", tag("a", "Back to your sessions", href="/"))
    return whole_page(tag("header", tag("h1", TITLE)), tag("main", error_part(error), back))


def not_started_page(error: SubletError, typed: Mapping[str, str], form: str) -> str:
    """Why no session was started, and the form as it was ``typed``, to be changed."""
    back = tag("p", tag("a", "Back to your sessions", href="/"))
    return whole_page(tag("header", tag("h1", TITLE)), tag("main", error_part(error), _start_form(form, typed), back))


def insist_page(error: SubletError, path: str, form: str) -> str:
    """What would be lost, with a form that is sent to this path once more to insist on it."""
    question = tag("div", tag("strong", _sentence(error.message)), class_="error", role="alert")
    button = tag("button", "Give the GPU back now" if path.endswith("/rest") else "End it now", class_="danger")
    back = tag("p", tag("a", "No, back to your sessions", href="/"))
    main = tag("main", question, form_of(path, form, button, now="1"), back)
    return whole_page(tag("header", tag("h1", TITLE)), main)


def unavailable_part(error: SubletError) -> str:
    """In the place of what a page shows, while that cannot be read."""
    return Html(error_part(error) + tag("p", "This page tries again by itself.", class_="dim"))


# ---- within


def live_page(
    person: Person,
    form: str,
    part: str,
    *more: str,
    live: str,
    links: Sequence[tuple[str, str]] = (),
    title: str = "",
    broad: bool = False,
) -> str:
    """A page of a person who is signed in, with a part that changes by itself: ``live`` tells how it is now."""
    note = tag("p", "Connection lost; this page tries again by itself.", id="lost", hidden="hidden", role="status")
    main = tag("main", Html(part), id="part", data_live=live)
    parts = (header(person, form, links), note, main, *more)
    return whole_page(*parts, script="/studio.js", refresh=True, title=title, broad=broad)


def header(person: Person, form: str, links: Sequence[tuple[str, str]] = ()) -> Html:
    """The person who is signed in, and the pages open to them."""
    return tag(
        "header",
        tag("h1", TITLE),
        tag(
            "div",
            *(tag("a", text, href=path) for text, path in links),
            tag("span", f"{person.name} · tenant {person.tenant}"),
            form_of("/sign-out", form, tag("button", "Sign out", class_="quiet")),
            class_="who",
        ),
    )


def _asking(
    path: str, name: str, label: str, button: str, hint: Sequence[str], error: SubletError | None, script: str = ""
) -> str:
    """A page with one secret to fill in."""
    problem = () if error is None else (error_part(error),)
    field = tag("input", id=name, name=name, type="password", autocomplete="current-password", required="required")
    form = tag(
        "form",
        tag("label", label, for_=name),
        field,
        tag("button", button),
        method="post",
        action=path,
        class_="sign-in",
    )
    main = tag("main", *problem, form, tag("p", *hint, class_="dim"))
    return whole_page(tag("header", tag("h1", TITLE)), main, script=script)


def whole_page(
    *parts: str, script: str = "", refresh: bool = False, onward: str = "", title: str = "", broad: bool = False
) -> str:
    """The document. ``refresh``: without scripts it is loaded again from time to time. ``onward``: where the
    browser goes by itself. ``title``: what a tab of the browser says first. ``broad``: it has large tables."""
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"{title} · {TITLE}" if title else TITLE),
        tag("link", rel="stylesheet", href="/studio.css"),
    ]
    if script:
        head.append(tag("script", src=script, defer="defer"))
    if refresh:
        head.append(tag("noscript", tag("meta", http_equiv="refresh", content="15")))
    if onward:
        head.append(tag("meta", http_equiv="refresh", content=f"0; url={at(onward)}"))
    whole = tag("html", tag("head", *head), tag("body", *parts, class_="broad" if broad else ""), lang="en")
    return f"<!doctype html>\n{whole}\n"


def form_of(action: str, form: str, *children: str, class_: str = "", **hidden: str) -> Html:
    """A form of the page, with the token of its forms."""
    fields = (tag("input", type="hidden", name=name, value=value) for name, value in {"form": form, **hidden}.items())
    return tag("form", *fields, *children, method="post", action=action, class_=class_)


def error_part(error: SubletError) -> Html:
    """What went wrong, and what to do."""
    return tag(
        "div",
        tag("strong", _sentence(error.message)),
        tag("p", *with_commands(error.do)),
        class_="error",
        role="alert",
    )


def with_commands(text: str) -> list[str]:
    """What stands in backticks is a command."""
    return [tag("code", piece) if number % 2 else piece for number, piece in enumerate(text.split("`"))]


def moment(text: str) -> str:
    """RFC 3339 to the minute, for people."""
    return f"{text[:10]} {text[11:16]} UTC"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _card(view: Json, form: str, *, may_change: bool) -> Html:
    title = tag("h3", view["name"], " ", tag("span", state(view), class_=f"state {view['state']}"))
    facts = [("asks for", _what(view))]
    offer = view["offer"]
    if offer:
        facts += offer_facts(offer)
    elif view["position"]:
        facts.append(("queue", place(view)))
    elif view["state"] == "waiting":
        facts.append(("queue", "asked for; the office has not answered yet"))
    elif view["reason"]:
        facts.append(("last asked", refusal(view["reason"])))
    last = view["leases"][-1] if view["leases"] else None
    if view["state"] == "active" and last is not None and last["devices"]:
        facts.append(("GPU", ", ".join(last["devices"])))
    if view["state"] == "active" and view["remaining"] is not None:
        unless = "" if view["busy"] else ", unless a cell renews it"
        facts.append(("time left", f"{about(view['remaining'])}{unless}"))
    if view["state"] == "resting" and last is not None and last["reason"]:
        why = f"{last['reason']}: {last['detail']}" if last["detail"] else last["reason"]
        facts.append(("last lease", f"{why}, {moment(last['until'])}"))
    facts.append(("saved", last_saved(view) or "nothing yet"))
    facts.append(("last activity", moment(view["active_at"])))
    facts.append(("bill so far", _bill_and_lines(view) if view["bill"] else "nothing yet"))
    if view["suspended"]:
        next_step = "Its program is suspended: run the next cell of its notebook, which goes on with it."
    elif offer:
        next_step = "" if offer["accepted"] else "Without an answer the session waits for what it asked for."
    elif view["busy"]:
        next_step = "A cell runs, and the lease is renewed while it does."
    elif view["state"] == "active":
        next_step = "Run a cell: its notebook takes the lease over."
    elif view["state"] == "waiting":
        next_step = "Run its cell, or close this page: the place in the queue is kept."
    elif view["saved_at"]:
        next_step = "Run a cell, or resume: it goes on with what was saved."
    else:
        next_step = ""
    rows = [Html(tag("dt", name) + tag("dd", value)) for name, value in facts]
    path = f"/sessions/{view['id']}"
    buttons = []
    if offer and not offer["accepted"]:
        buttons.append(form_of(f"{path}/accept", form, tag("button", "Accept the offer")))
        buttons.append(form_of(f"{path}/decline", form, tag("button", "Decline: keep waiting", class_="quiet")))
    if view["state"] == "resting" and not view["suspended"]:
        buttons.append(form_of(f"{path}/resume", form, tag("button", "Resume")))
        if not view["terms"]["or_smaller"]:
            or_less = tag("button", "Resume: less will do", class_="quiet")
            buttons.append(form_of(f"{path}/resume", form, or_less, less="1"))
    if view["state"] in ("active", "waiting", "offered"):
        label = "Rest: give the GPU back" if view["state"] == "active" else "Leave the queue"
        is_first = view["state"] == "active" and not view["busy"]
        buttons.append(form_of(f"{path}/rest", form, tag("button", label, class_="" if is_first else "quiet")))
    buttons.append(form_of(f"{path}/end", form, tag("button", "End", class_="quiet")))
    cells: Sequence[Html] = ()
    if view["cells"]:
        heads = tag("tr", *(tag("th", text, scope="col") for text in CELL_HEADS))
        body = (tag("tr", *(tag("td", text) for text in cell_row(cell))) for cell in reversed(view["cells"]))
        shown = tag("table", tag("thead", heads), tag("tbody", *body))
        cells = (_details(f"cells-{view['id']}", f"Last cells ({len(view['cells'])})", shown),)
    return tag(
        "article",
        title,
        tag("dl", *rows),
        *cells,
        *((tag("p", next_step, class_="dim"),) if next_step else ()),
        tag("p", "In a notebook: ", tag("code", f"SUBLET_SESSION={view['id']}"), class_="dim"),
        *((tag("div", *buttons, class_="buttons"),) if may_change else ()),
    )


def _details(ident: str, summary: str, body: Html) -> Html:
    """Folded away; the script keeps it open when the page changes."""
    return tag("details", tag("summary", summary), tag("div", body, class_="wide"), id=ident)


def _bill_and_lines(view: Json) -> Html:
    """The bill so far, and where its lines are."""
    lines = tag("a", "line by line", href=f"/sessions/{view['id']}/bill")
    return tag("span", the_bill(view["bill"]), " · ", lines)


def _ended_row(view: Json) -> Html:
    bill = _bill_and_lines(view) if view["bill"] else "nothing"
    cells = (view["name"], moment(view["started_at"]), view["volume"], bill)
    return tag("tr", *(tag("td", cell) for cell in cells))


def _start_form(form: str, typed: Mapping[str, str] = _NOTHING) -> Html:
    """``typed``: what it is filled with."""

    def field(name: str, label: str, **more: str) -> Html:
        given = {"value": typed[name]} if typed.get(name) else {}
        return tag("label", label, tag("input", name=name, autocomplete="off", **more, **given))

    def box(name: str, label: str) -> Html:
        given = {"checked": "checked"} if typed.get(name) == "1" else {}
        return tag("label", tag("input", type="checkbox", name=name, value="1", **given), label, class_="check")

    return tag(
        "section",
        tag("h2", "New session"),
        form_of(
            "/start",
            form,
            field("name", "Name", required="required", maxlength="63", placeholder="thesis"),
            field("vram", "GPU memory", required="required", maxlength="20", placeholder="8GiB"),
            field("count", "GPUs (optional)", maxlength="4", placeholder="1", inputmode="numeric"),
            field("ttl", "Time to live (optional)", maxlength="20", placeholder="5m"),
            field("model", "Model (optional)", maxlength="100", placeholder="A100"),
            box("less", "Less will do: offer me a smaller GPU, or another model"),
            box("pay", "Pay for priority, where the office sells it"),
            tag("button", "Start"),
            class_="start",
        ),
    )


def _connect_part(connect: ConnectView, form: str) -> Html:
    """How programs of the person connect, and with which tokens."""
    rows = [
        (
            one.label,
            "everything" if one.scope.session is None else one.scope.session,
            "read only" if one.scope.read_only else "",
            moment(rfc3339(one.expires_ns)) if one.expires_ns is not None else "until revoked",
            form_of("/tokens/revoke", form, tag("button", "Revoke", class_="quiet"), label=one.label),
        )
        for one in connect.tokens
    ]
    heads = tag("tr", *(tag("th", text, scope="col") for text in ("Token", "Opens", "", "Good until", "")))
    body = tag("tbody", *(tag("tr", *(tag("td", cell) for cell in row)) for row in rows))
    label = tag("input", name="label", required="required", maxlength="63", placeholder="laptop", autocomplete="off")
    session = tag("input", name="session", maxlength="63", placeholder="its name or id", autocomplete="off")
    valid = tag("input", name="valid", maxlength="20", placeholder="90d", autocomplete="off")
    return tag(
        "details",
        tag("summary", "Connect a notebook or a shell; tokens"),
        *_exports(connect, "…"),
        tag("p", *with_commands(_who_connects(connect)), class_="dim"),
        *((tag("div", tag("table", tag("thead", heads), body), class_="wide"),) if rows else ()),
        form_of(
            "/tokens",
            form,
            tag("label", "New token, called", label),
            tag("label", "Only for session (optional)", session),
            tag("label", "Good for (optional)", valid),
            tag("button", "Make a token", class_="quiet"),
            class_="start",
        ),
    )


def _exports(connect: ConnectView | None, token: str) -> list[Html]:
    """What a shell sets before it starts a notebook."""
    lines = [f"export SUBLET_STUDIO_TOKEN={token}"]
    if connect is not None:
        lines.insert(0, f"export SUBLET_STUDIO={connect.studio_url}")
        if connect.office_url:
            lines.insert(0, f"export SUBLET_URL={connect.office_url}")
        if connect.office_url and connect.needs_token and not connect.is_owner:
            lines.append("export SUBLET_TOKEN=…")
    return [tag("pre", tag("code", "\n".join(lines)), class_="token")]


def _who_connects(connect: ConnectView) -> str:
    if connect.is_owner:
        return "You own the office: SUBLET_SESSION alone is enough in your own shell."
    if not connect.office_url:
        return (
            "This office has no socket for other users of the machine; "
            "its operator opens one with `sublet up --shared`."
        )
    if connect.uid is None:
        return "From any user of the machine, with your tenant's access token (SUBLET_TOKEN), which the operator has."
    needs = "with your tenant's access token (SUBLET_TOKEN)" if connect.needs_token else "without any other token"
    return f"As user {connect.uid} of the machine, {needs}."


def _what(view: Json) -> str:
    terms = view["terms"]
    size = f"{format_size(terms['vram'])} of GPU memory"
    many = f"{terms['count']} × {size}" if terms["count"] > 1 else size
    paid = ", pays for priority" if terms["pay_priority"] else ""
    return f"{many}{', or less' if terms['or_smaller'] else ''}, tier {terms['tier']}{paid}"
