"""``sublet person``: manages the studio's people, their tokens and invites."""

from __future__ import annotations

import csv
import sys
from typing import TYPE_CHECKING, Annotated

from sublet.cli.call import CommandOffice
from sublet.cli.declare import Arg, Opt, UsageError
from sublet.cli.exit_status import DONE
from sublet.cli.parsing import AsJson, duration, name
from sublet.cli.show import Json, document, plural, table, visible
from sublet.client.home import home_dir
from sublet.errors import InvalidRequest, NotFound
from sublet.invocation import typeable

if TYPE_CHECKING:
    from sublet.studio.people import People, Person, Token
    from sublet.studio.roster import Roster


def _base(text: str) -> str:
    if not text.startswith(("http://", "https://")) or not text.isascii() or not text.isprintable() or " " in text:
        raise InvalidRequest(f"{text[:60]!r} is not the address of a studio", do="Write it as https://gpu.example.org.")
    return text.rstrip("/")


def _user(text: str) -> int:
    uid = int(text) if text.isascii() and text.isdigit() else _user_number(text)
    if uid is None:
        raise InvalidRequest(f"there is no user {text[:40]} on this machine", do="Give its number: `id -u NAME`.")
    return uid


_Name = Annotated[str, Arg("NAME", parse=name, help="Name of the person.")]
_Url = Annotated[
    str | None,
    Opt(
        "--url",
        metavar="URL",
        parse=_base,
        help="Address of the studio as people reach it (default: where studio.toml has it listen).",
    ),
]
_InviteValid = Annotated[
    float | None,
    Opt("--valid", metavar="DURATION", parse=duration, help="Validity of invites (default: 14d)."),
]


def add(
    *,
    person: _Name,
    tenant: Annotated[
        str, Opt("--tenant", metavar="TENANT", parse=name, help="Tenant whose quota, share and bill are used.")
    ],
    uid: Annotated[
        int | None,
        Opt("--uid", metavar="USER", parse=_user, help="User of this machine that the tenant is bound to (see below)."),
    ] = None,
    valid: Annotated[
        float | None,
        Opt("--valid", metavar="DURATION", parse=duration, help="Validity of the token (default: until revoked)."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Add a person to the studio and print the person's token, once.

    The token alone goes to stdout. The studio stores only its hash. The tenant is one of `sublet tenant ls`; several
    people may share one, except for the owner's (`local`). With --uid (a number or a login name) that user of the
    machine alone may be the tenant, and needs no token for the office.
    """
    office = CommandOffice.reach()
    office.get(f"/v1/tenants/{CommandOffice.quote(tenant)}")
    people = _people()
    if uid is not None:
        _bind_to_user(office, tenant, uid)
    made = people.add(person, tenant)
    secret = people.new_token(person, valid_s=valid)
    return _print_secret(people, made, f"Person {person} is added. The token", "token", secret, as_json=as_json)


def enrol(
    *,
    file: Annotated[str, Arg("FILE", help="CSV file whose first line names its columns; - for stdin.")],
    tenant: Annotated[
        str | None,
        Opt("--tenant", metavar="TENANT", parse=name, help="Tenant of every person (default: the column `tenant`)."),
    ] = None,
    group: Annotated[
        str | None,
        Opt("--group", metavar="GROUP", parse=name, help="Create the missing tenants of the list, in this group."),
    ] = None,
    skip_known: Annotated[
        bool, Opt("--skip-known", help="Skip people of the list who exist already with the same tenant.")
    ] = False,
    valid: _InviteValid = None,
    url: _Url = None,
    as_json: AsJson = False,
) -> int:
    """Add the people of a list and print an invite link for each as CSV, once.

    The list has a column `name`, and a column `tenant` unless --tenant is given. A column `uid` binds the tenant to
    that user of this machine (number or login name), who then needs no token for the office; a tenant that is made
    without one gets a token, in a column of its own. Other columns are ignored. If any line is wrong, all wrong
    lines are listed and nothing is added.
    """
    from sublet.studio.people import INVITE_S
    from sublet.studio.roster import BYTES_MAX, RosterRefused, read_roster

    try:
        with open(0 if file == "-" else file, "rb", closefd=file != "-") as source:
            data = source.read(BYTES_MAX + 1)
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be read: {error.strerror}", do="Give the path of a CSV file.") from None
    url = url or _listening()
    people = _people()
    office = CommandOffice.reach()
    tenants: dict[str, int | None] = {str(one["id"]): one.get("uid") for one in office.get("/v1/tenants")}
    if group is not None and group not in [one["id"] for one in office.get("/v1/groups")]:
        raise NotFound(f"there is no group {group}", do="`sublet group ls` lists them, `sublet group add` makes one.")
    known = {one.name: one.tenant for one in people.all()}
    try:
        roster = read_roster(
            data,
            tenant=tenant,
            tenants=tenants,
            known=known,
            skip_known=skip_known,
            make=group is not None,
            users={one: uid for one, uid in tenants.items() if uid is not None},
            number_of=_user_number,
        )
    except RosterRefused as error:
        sys.stderr.writelines(f"{visible(line)}\n" for line in error.lines)
        raise
    tokens = _bind(office, roster, group)
    added = people.invite_all(roster.new, INVITE_S if valid is None else valid)
    rows = [
        {"name": one.name, "tenant": one.tenant, "invite": f"{url}/join#{invite}"}
        | ({"token": tokens.get(one.tenant, "")} if tokens else {})
        for one, invite in added
    ]
    if as_json:
        document(rows)
    else:
        columns = ["name", "tenant", "invite", *(["token"] if tokens else [])]
        writer = csv.DictWriter(sys.stdout, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    parts = [f"{plural(len(added), 'person', 'people')} added"]
    if roster.tenants:
        parts.append(f"{plural(len(roster.tenants), 'tenant')} made")
    if bound := [*roster.bound, *(one for one in roster.tenants if one[1] is not None)]:
        parts.append(f"{plural(len(bound), 'tenant')} bound to a user of this machine")
    if roster.known:
        parts.append(f"{plural(len(roster.known), 'person', 'people')} of the list there already")
    if roster.left_alone:
        parts.append(f"columns left alone: {', '.join(map(visible, roster.left_alone))}")
    sys.stderr.write(f"{'; '.join(parts)}.\n")
    return DONE


def invite(*, person: _Name, valid: _InviteValid = None, url: _Url = None, as_json: AsJson = False) -> int:
    """Print a new invite link for a person, once; the earlier link stops working.

    The link works once. It logs a browser in with a new token labelled `main`, which replaces the earlier one.
    """
    from sublet.studio.people import INVITE_S

    url = url or _listening()
    people = _people()
    secret = people.invite(person, INVITE_S if valid is None else valid)
    link = f"{url}/join#{secret}"
    return _print_secret(people, people.find(person), "The invite", "invite", link, as_json=as_json)


def token(
    *,
    person: _Name,
    label: Annotated[
        str | None,
        Opt("--label", metavar="LABEL", parse=name, help="Label of the token (default: `main`)."),
    ] = None,
    valid: Annotated[
        float | None,
        Opt("--valid", metavar="DURATION", parse=duration, help="Validity of the token (default: until revoked)."),
    ] = None,
    read_only: Annotated[bool, Opt("--read-only", help="Make a token that shows sessions and changes none.")] = False,
    session: Annotated[
        str | None, Opt("--session", metavar="SESSION", help="Name or id of the only session that the token opens.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Print a new token for a person, once; the old token with that label and its browsers are logged out."""
    from sublet.studio.people import FIRST_LABEL, TokenScope

    people = _people()
    found = people.find(person)
    scope = TokenScope(read_only=read_only, session=None if session is None else _session_of(found, session))
    secret = people.new_token(person, label or FIRST_LABEL, valid_s=valid, scope=scope)
    return _print_secret(people, found, f"Person {person} has a new token. It", "token", secret, as_json=as_json)


def change(
    *,
    person: _Name,
    operator: Annotated[bool, Opt("--operator", help="Let the person see the office and act on it.")] = False,
    teacher: Annotated[
        list[str],
        Opt("--teacher", metavar="GROUP", parse=name, help="Let the person see the members of a group. Repeatable."),
    ] = [],  # noqa: B006 - never changed, as for every command
    member: Annotated[bool, Opt("--member", help="Let the person see only sessions of their own.")] = False,
    as_json: AsJson = False,
) -> int:
    """Change what a person of the studio may do, from the next request on.

    An operator sees devices, queue, leases, tenants and the audit log on the page, and may drain a node or clear a
    quarantined device there. A teacher sees who of the groups has a GPU or waits for one, and what is reserved. Each
    person is a member at first.
    """
    if sum((operator, bool(teacher), member)) != 1:
        raise UsageError("one of --operator, --teacher and --member is needed", do="Give one of them.")
    if teacher:
        known = [one["id"] for one in CommandOffice.listing("/v1/groups")]
        for group in teacher:
            if group not in known:
                raise NotFound(f"there is no group {group}", do="`sublet group ls` lists them.")
    people = _people()
    people.set_role(person, operator=operator, teaches=teacher)
    if as_json:
        document(_view(people, people.find(person)))
    else:
        role = f"a teacher of {', '.join(sorted(set(teacher)))}" if teacher else "a member"
        print(f"Person {person} is {'an operator' if operator else role}.")
    return DONE


def revoke(
    *,
    person: _Name,
    label: Annotated[
        str | None, Arg("LABEL", parse=name, help="Label of the token (default: all, and the invite).")
    ] = None,
) -> int:
    """Revoke tokens of a person; browsers that logged in with them are logged out at once."""
    ended = _people().revoke(person, label)
    what = f"{plural(ended, 'token')} and the invite" if label is None else f"token {label}"
    print(f"Person {person}: {what} revoked.")
    return DONE


def ls(*, as_json: AsJson = False) -> int:
    """List the people of the studio."""
    people = _people()
    found = [_view(people, person) for person in people.all()]
    if as_json:
        document(found)
    elif not found:
        print(typeable("No people. Add one: `sublet person add NAME --tenant TENANT`."))
    else:
        rows = [[_called(one), one["tenant"], str(len(one["tokens"])), one["invited_until"] or "-"] for one in found]
        print(table(["PERSON", "TENANT", "TOKENS", "INVITED UNTIL"], rows))
    return DONE


def show(*, person: _Name, as_json: AsJson = False) -> int:
    """Show a person: tenant, invite, and each token with its scope and expiry."""
    people = _people()
    view = _view(people, people.find(person))
    if as_json:
        document(view)
        return DONE
    print(f"{_called(view)}, tenant {view['tenant']}; invite: {view['invited_until'] or 'none'}")
    if view["tokens"]:
        rows = [[one["label"], one["opens"], one["expires_at"] or "-"] for one in view["tokens"]]
        print(table(["TOKEN", "OPENS", "UNTIL"], rows))
    return DONE


def rm(
    *,
    person: _Name,
    now: Annotated[bool, Opt("--now", help="End the person's sessions, with what runs in them.")] = False,
    as_json: AsJson = False,
) -> int:
    """Remove a person. It is refused while the person has sessions, unless --now ends them; volumes and bill stay."""
    from sublet.client.fabric import connect
    from sublet.studio import FabricOffice, open_sessions
    from sublet.studio.people import OWNER_TENANT
    from sublet.studio.service import person_folder

    people = _people()
    found = people.find(person)
    view = _view(people, found)
    if found.tenant != OWNER_TENANT:  # those of the owner are also the command's, and stay
        with connect(for_tenant=found.tenant) as fabric:
            sessions = open_sessions(FabricOffice(fabric), folder=person_folder(home_dir(), found))
            live = [one for one in sessions.all() if not one.is_over]
            if live and not now:
                raise InvalidRequest(
                    f"{person} has {plural(len(live), 'session')}", do="End them first, or add --now to end them here."
                )
            people.remove(person)  # first, so that no other session is started
            for one in (one for one in sessions.all() if not one.is_over):
                sessions.end(one.id, even_if_busy=True)
    else:
        people.remove(person)
    if as_json:
        document(view)
    else:
        print(f"Person {person} is removed.")
    return DONE


# ---- within


def _listening() -> str:
    """The address at which people of this machine find the studio, by its settings."""
    from sublet.cli.studio import read_settings
    from sublet.studio.config import FILE

    settings = read_settings(home_dir() / FILE)
    host, port = settings.address
    if settings.socket is not None or not port:
        where = "a unix socket" if settings.socket is not None else "any free port"
        raise InvalidRequest(
            f"by {FILE} the studio listens on {where}, so a link to it cannot be made",
            do="Give its address as people reach it: --url https://gpu.example.org.",
        )
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _bind(office: CommandOffice, roster: Roster, group: str | None) -> dict[str, str]:
    """Make and bind the tenants of a list; the tokens of those that are bound to no user."""
    tokens: dict[str, str] = {}
    for tenant, uid in roster.tenants:
        user = {} if uid is None else {"uid": uid, "needs_token": False}
        made = office.post("/v1/tenants", {"id": tenant, "group": group, **user})
        if uid is None:
            tokens[tenant] = made["token"]
    for tenant, uid in roster.bound:
        _bind_to_user(office, tenant, uid)
    return tokens


def _bind_to_user(office: CommandOffice, tenant: str, uid: int) -> None:
    office.patch(f"/v1/tenants/{CommandOffice.quote(tenant)}", {"uid": uid, "needs_token": False})


def _user_number(login: str) -> int | None:
    """Of the user with this login name; None where there is none."""
    import pwd

    try:
        return pwd.getpwnam(login).pw_uid
    except (KeyError, ValueError):
        return None


def _session_of(person: Person, session: str) -> str:
    """The id of the person's session with this name or id. The office need not run for that."""
    from sublet.studio.records import Session, fold_all
    from sublet.studio.service import person_folder
    from sublet.studio.sessions import find_session
    from sublet.studio.store import SqliteStore

    found: dict[str, Session] = {}
    fold_all(found, SqliteStore(person_folder(home_dir(), person)).read(0))
    try:
        return find_session(list(reversed(found.values())), session).id
    except NotFound as error:
        raise NotFound(
            f"{person.name} has no session {visible(session[:40])}",
            do="The person's page lists them, and so does `sublet session ls` of the person.",
        ) from error


def _people() -> People:
    import secrets
    import time

    from sublet.studio.office import sessions_folder
    from sublet.studio.people import People

    return People(sessions_folder(), wall_ns=time.time_ns, random=secrets.token_bytes)


def _view(people: People, person: Person) -> Json:
    return {
        "id": person.id,
        "name": person.name,
        "tenant": person.tenant,
        "operator": person.is_operator,
        "teaches": list(person.teaches),
        "tokens": [_token_view(one) for one in people.tokens(person)],
        "invited_until": _moment(people.invited_until_ns(person)),
    }


def _called(view: Json) -> str:
    if view["teaches"]:
        return f"{view['name']} (teacher of {', '.join(view['teaches'])})"
    return f"{view['name']} (operator)" if view["operator"] else str(view["name"])


def _token_view(found: Token) -> Json:
    opens = found.scope.session or "everything"
    return {
        "label": found.label,
        "opens": f"{opens}, read only" if found.scope.read_only else opens,
        "read_only": found.scope.read_only,
        "session": found.scope.session,
        "expires_at": _moment(found.expires_ns),
    }


def _moment(wall_ns: int | None) -> str | None:
    from sublet.lease.value import rfc3339

    return None if wall_ns is None else rfc3339(wall_ns)


def _print_secret(people: People, person: Person, what: str, key: str, secret: str, *, as_json: bool) -> int:
    if as_json:
        document({"person": _view(people, person), key: secret})
        return DONE
    sys.stderr.write(f"{what}, shown this once:\n")
    print(secret)
    return DONE
