"""``sublet studio``: sessions for many people over HTTP."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from sublet.cli.declare import Opt, UsageError
from sublet.cli.exits import DONE
from sublet.cli.show import visible
from sublet.client.home import home_dir, make_private_dir
from sublet.errors import InvalidRequest, SubletError, Unsupported
from sublet.invocation import installing, typeable

if TYPE_CHECKING:
    from sublet.studio.people import Person

LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")
PORT: Final = 8320
BACKLOG: Final = 512
GRACE_S: Final = 2
"""Requests in progress have this long when the studio ends; open pages are cut off."""


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


# ---- within


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
        print(typeable("There are no people yet: `sublet person add NAME --tenant TENANT`."), flush=True)
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
