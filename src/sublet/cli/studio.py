"""``sublet studio``: sessions for many people over HTTP. ``sublet person``: who they are."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from sublet.cli.call import Office
from sublet.cli.declare import Arg, Opt, UsageError
from sublet.cli.exits import DONE
from sublet.cli.parsing import AsJson, duration, name
from sublet.cli.show import Json, document, plural, table, visible
from sublet.client.home import home_dir, make_private_dir
from sublet.errors import InvalidRequest, SubletError, Unsupported
from sublet.invocation import installing, typeable

if TYPE_CHECKING:
    from sublet.studio.people import People, Person

LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")
PORT: Final = 8320
BACKLOG: Final = 512
GRACE_S: Final = 2
"""Requests in progress have this long when the studio ends; open pages are cut off."""

_Name = Annotated[str, Arg("NAME", parse=name, help="Name of the person.")]
_Valid = Annotated[
    float | None,
    Opt("--valid", metavar="DURATION", parse=duration, help="How long the token is good (default: until replaced)."),
]


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if host not in LOOPBACK:
        raise InvalidRequest(
            f"{text!r} is not an address of this machine alone, and tokens would travel in the clear",
            do="Use 127.0.0.1:PORT, and put a proxy that speaks TLS before it.",
        )
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise InvalidRequest(f"{port!r} is not a port", do="Use a number up to 65535; 0 takes a free one.")
    return host, int(port)


def studio(
    *,
    listen: Annotated[
        Any,  # a host and a port, or None
        Opt(
            "--listen",
            metavar="HOST:PORT",
            parse=_address,
            help=f"Loopback address to listen on (default: 127.0.0.1:{PORT}).",
        ),
    ] = None,
    at: Annotated[
        str | None, Opt("--socket", metavar="PATH", help="Unix socket to listen on, in place of an address.")
    ] = None,
) -> int:
    """Serve sessions to the people that `sublet person add` names: an API, and a page for browsers.

    It runs beside the office of this machine, which it starts if there is none, until Ctrl-C. Leases, and places in the
    queue, outlive it; when it is started again, requests that waited go on.
    """
    if listen is not None and at is not None:
        raise UsageError("--listen and --socket contradict each other", do="Give one of them.")
    if os.environ.get("SUBLET_URL") or os.environ.get("SUBLET_TOKEN"):
        raise UsageError(
            "the studio runs beside its office, as its owner", do="Unset SUBLET_URL and SUBLET_TOKEN for it."
        )
    try:
        import starlette  # noqa: F401
    except ImportError:
        raise Unsupported(
            "starlette is not installed beside this Sublet", do=f"Install it: `{installing('sublet[studio]')}`."
        ) from None
    home = home_dir()
    with _alone(home), _listening(listen or (LOOPBACK[0], PORT), at) as (listening, where):
        _serve(home, listening, where)
    # Without the end of an interpreter: that would give back what waits, and this is to be found again.
    sys.stdout.flush()
    os._exit(DONE)


def add(
    *,
    person: _Name,
    tenant: Annotated[
        str, Opt("--tenant", metavar="TENANT", parse=name, help="Tenant whose quota, share and bill are used.")
    ],
    valid: _Valid = None,
    as_json: AsJson = False,
) -> int:
    """Add a person to the studio and print the person's token, this once.

    The token alone goes to stdout. The studio stores only its hash. The tenant is one of `sublet tenant ls`; several
    people may share one, except for the owner's (`local`).
    """
    Office.reach().get(f"/v1/tenants/{Office.quote(tenant)}")
    made, secret = _people().add(person, tenant, valid)
    return _say_token(made, f"Person {made.name} is added.", secret, as_json=as_json)


def token(*, person: _Name, valid: _Valid = None, as_json: AsJson = False) -> int:
    """Print a new token of a person, this once; the old one and its browsers are out at once."""
    people = _people()
    secret = people.new_token(person, valid)
    return _say_token(people.find(person), f"Person {person} has a new token.", secret, as_json=as_json)


def ls(*, as_json: AsJson = False) -> int:
    """List the people of the studio."""
    found = [_view(person) for person in _people().all()]
    if as_json:
        document(found)
    elif not found:
        print(typeable("No people. Add one: `sublet person add NAME --tenant TENANT`."))
    else:
        rows = [[view["name"], view["tenant"], view["expires_at"] or "-"] for view in found]
        print(table(["PERSON", "TENANT", "TOKEN UNTIL"], rows))
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
        document(_view(found))
    else:
        print(f"Person {person} is removed.")
    return DONE


# ---- within


def _people() -> People:
    import secrets
    import time

    from sublet.studio.office import sessions_folder
    from sublet.studio.people import People

    return People(sessions_folder(), wall_ns=time.time_ns, random=secrets.token_bytes)


def _view(person: Person) -> Json:
    from sublet.lease.value import rfc3339

    expires_at = None if person.expires_ns is None else rfc3339(person.expires_ns)
    return {"id": person.id, "name": person.name, "tenant": person.tenant, "expires_at": expires_at}


def _say_token(person: Person, sentence: str, secret: str, *, as_json: bool) -> int:
    if as_json:
        document({"person": _view(person), "token": secret})
        return DONE
    sys.stderr.write(f"{sentence} The token, shown this once:\n")
    print(secret)
    return DONE


@contextlib.contextmanager
def _alone(home: Path) -> Iterator[None]:
    """One studio for one state folder."""
    from sublet.studio.office import sessions_folder

    path = make_private_dir(sessions_folder(str(home))) / "studio.lock"
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InvalidRequest(f"a studio runs already for {home}", do="Use that one, or end it first.") from None
    yield  # and it is held until the process ends


@contextlib.contextmanager
def _listening(address: tuple[str, int], path: str | None) -> Iterator[tuple[socket.socket, str]]:
    """A listening socket, and its address for people."""
    family = socket.AF_UNIX if path is not None else socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        if path is not None:
            where = _bind_unix(listening, path)
        else:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            host = f"[{address[0]}]" if ":" in address[0] else address[0]
            where = f"http://{host}:{listening.getsockname()[1]}/"
        listening.listen(BACKLOG)
    except OSError as error:
        wanted = path if path is not None else f"{address[0]}:{address[1]}"
        raise InvalidRequest(
            f"the studio cannot listen on {wanted}: {error.strerror or error}", do="Choose another with --listen."
        ) from error
    with listening:
        yield listening, where


def _bind_unix(listening: socket.socket, path: str) -> str:
    """Bind where nothing is, or where a studio was; who may enter the folder may connect, and needs a token."""
    with contextlib.suppress(FileNotFoundError):
        with socket.socket(socket.AF_UNIX) as other:
            if other.connect_ex(path) == 0 or not Path(path).is_socket():
                raise InvalidRequest(f"{path} is in use", do="Choose another path with --socket.")
        os.unlink(path)
    listening.bind(path)
    os.chmod(path, 0o666)
    return f"unix://{os.path.abspath(path)}"


def _serve(home: Path, listening: socket.socket, where: str) -> None:
    from uvicorn import Config, Server

    from sublet.studio.service import Studio
    from sublet.studio.web import studio_app

    made = Studio(home)

    def failed(person: Person, error: SubletError) -> None:
        sys.stderr.write(f"The sessions of {person.name} cannot be looked at: {visible(str(error))}\n")

    made.go_on(failed)
    print(f"The studio is up: pid {os.getpid()}, {where}. Ctrl-C ends it; leases go on.", flush=True)
    if not made.people.all():
        print(typeable("Nobody can sign in yet: `sublet person add NAME --tenant TENANT`."), flush=True)
    config = Config(
        studio_app(made),
        http="h11",  # it bounds the head of a request
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=GRACE_S,
    )
    with contextlib.suppress(KeyboardInterrupt):
        Server(config).run(sockets=[listening])
