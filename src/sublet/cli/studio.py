"""``sublet studio``: serves sessions to many people over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from sublet.background import start_thread
from sublet.cli.declare import Opt, UsageError
from sublet.cli.exit_status import DONE
from sublet.cli.show import plural, visible
from sublet.client.home import home_dir
from sublet.errors import Disconnected, InvalidRequest, SubletError, Unsupported
from sublet.invocation import installing, typeable
from sublet.logs import LogFormat, fields, log_to_stderr
from sublet.studio.config import DEFAULTS, FILE, PORT, StudioSettings, changes, parse_address, parse_config
from sublet.values import shown
from sublet.wire.unix import ADDRESS_BYTES_MAX

if TYPE_CHECKING:
    from sublet.studio.people import Person
    from sublet.studio.right import OfficeRight
    from sublet.studio.service import Studio

_log: Final = logging.getLogger("sublet.studio")
BACKLOG: Final = 512
WAIT_S: Final = 0.5
"""Between two looks for an office that the system starts."""
HUB_TOKEN_MIN: Final = 32
SWITCH_S: Final = 0.0005
"""A thread that computes leaves the interpreter to others so often. With Python's 5 ms each step of a request takes as
much longer while pages are made, and a request has a dozen."""
COLLECT_AFTER: Final = (5_000, 20, 200)
"""Objects, and collections of the younger ones, after which garbage is collected: young, middle, all. With Python's
numbers all of it is walked through again and again while hundreds of pages change, and no request goes on meanwhile."""
GRACE_S: Final = 2
"""Requests in progress have this long when the studio ends."""


def studio(
    *,
    listen: Annotated[
        Any,  # a host and a port, or None
        Opt(
            "--listen",
            metavar="HOST:PORT",
            parse=parse_address,
            help=f"Loopback address to listen on (default: 127.0.0.1:{PORT}).",
        ),
    ] = None,
    at: Annotated[
        str | None, Opt("--socket", metavar="PATH", help="Unix socket to listen on, in place of an address.")
    ] = None,
    config: Annotated[
        str | None,
        Opt("--config", metavar="FILE", help="File of settings (default: studio.toml in the state folder)."),
    ] = None,
    no_start: Annotated[
        bool, Opt("--no-start", help="Wait for the office that the system starts (default: start one if none runs).")
    ] = False,
    log_format: Annotated[
        str | None,
        Opt("--log-format", choices=[one.value for one in LogFormat], help="How the log is written (default: text)."),
    ] = None,
    check: Annotated[bool, Opt("--check", help="Check the file of settings, and start nothing.")] = False,
) -> int:
    """Serve sessions to the people that `sublet person add` names: an API, and a page for browsers.

    It runs until Ctrl-C or SIGTERM (exit status 0) beside the office of this user, which it starts if there is none. To
    run it as a user of its own, name the office with SUBLET_URL and set SUBLET_TOKEN to the token that
    `sublet tenant add NAME --studio` printed. Leases and places in the queue outlive it, and waiting requests go on
    when it is started again. SIGHUP reads the settings file again: whole or, if it has a mistake, not at all.
    """
    if config is not None and not config.strip():
        raise UsageError("no file is named", do="Write `sublet studio --config FILE`.")
    home = home_dir()
    path = home / FILE if config is None else Path(config)
    settings = read_settings(path, must_exist=check or config is not None)
    token = _hub_token(settings)
    if check:
        print(
            f"{visible(str(path))} is right: {plural(len(settings.given), 'key')} set, the others have their defaults."
        )
        return DONE
    if listen is not None and at is not None:
        raise UsageError("--listen and --socket contradict each other", do="Give one of them.")
    from sublet.studio.metrics import REQUESTS
    from sublet.studio.office import FOLDER
    from sublet.studio.store import studio_lock

    try:
        import starlette  # noqa: F401
    except ImportError:
        raise Unsupported(
            "starlette is not installed beside this Sublet", do=f"Install it: `{installing('sublet[studio]')}`."
        ) from None
    if at is None and listen is None:
        at = settings.socket
    form = settings.log_format if log_format is None else LogFormat(log_format)
    log_to_stderr("studio", form, info=(_log.name,))
    if form is LogFormat.TEXT:  # a line for each request is for machines: people look at the metrics
        logging.getLogger(REQUESTS).setLevel(logging.WARNING)
    with studio_lock(home / FOLDER), listening_on(listen or settings.address, at) as (listening, where):
        signal.signal(signal.SIGTERM, _interrupted)
        with contextlib.suppress(KeyboardInterrupt):
            _serve(home, listening, where, path, settings, token, start=not no_start)
    # Without the end of an interpreter: that would give back what waits, and this is to be found again.
    sys.stdout.flush()
    os._exit(DONE)


# ---- within


def read_settings(path: Path, *, must_exist: bool = False) -> StudioSettings:
    """What the file says; the defaults where there is none."""
    from sublet.engines.operator_limits import read_operator_file

    text = read_operator_file(path, must_exist=must_exist)
    return DEFAULTS if text is None else parse_config(text, str(path))


@contextlib.contextmanager
def listening_on(
    address: tuple[str, int], path: str | None, *, mode: int = 0o666
) -> Iterator[tuple[socket.socket, str]]:
    """A listening socket, and its address for people. ``mode``: of a unix socket."""
    family = socket.AF_UNIX if path is not None else socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as listening:
        try:
            if path is not None:
                where = _bind_unix(listening, path, mode)
            else:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listening.bind(address)
                host = f"[{address[0]}]" if ":" in address[0] else address[0]
                where = f"http://{host}:{listening.getsockname()[1]}/"
            listening.listen(BACKLOG)
        except OSError as error:
            wanted = path if path is not None else f"{address[0]}:{address[1]}"
            option = "--listen" if path is None else "--socket"
            raise InvalidRequest(
                f"the studio cannot listen on {wanted}: {error.strerror or error}", do=f"Choose another with {option}."
            ) from error
        yield listening, where


def _bind_unix(listening: socket.socket, path: str, mode: int) -> str:
    """Bind where nothing is, or where a studio was; a user who may enter the folder may connect, and needs a token."""
    if not 0 < len(os.fsencode(path)) <= ADDRESS_BYTES_MAX:  # programs that connect could not name it
        raise InvalidRequest(
            f"the path of a unix socket has 1 to {ADDRESS_BYTES_MAX} bytes, and {shown(path)} has not",
            do="Choose another with --socket.",
        )
    with contextlib.suppress(FileNotFoundError):
        is_free = stat.S_ISSOCK(os.lstat(path).st_mode)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as other:
            is_free = is_free and other.connect_ex(path) == errno.ECONNREFUSED
        if not is_free:
            raise InvalidRequest(f"{path} is in use", do="Choose another path with --socket.")
        os.unlink(path)
    listening.bind(path)
    os.chmod(path, mode)
    return f"unix://{os.path.abspath(path)}"


def _hub_token(settings: StudioSettings) -> str:
    """The token by which a JupyterHub knows this studio; empty where there is no hub."""
    if settings.hub_api is None:
        return ""
    from sublet.engines.operator_limits import read_operator_file

    path = Path(settings.hub_token_file)
    try:
        token = (read_operator_file(path, must_exist=True) or "").strip()
    except InvalidRequest as error:
        raise InvalidRequest(f"hub.token_file: {error.message}", do=error.do) from error
    if path.stat().st_mode & stat.S_IROTH:
        raise InvalidRequest(
            f"every user can read {path}, and it opens the studio to a hub", do=f"Run `chmod 600 {path}`; make another."
        )
    if len(token) < HUB_TOKEN_MIN or not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidRequest(
            f"{path} holds no token of {HUB_TOKEN_MIN} or more characters", do=f"Run `openssl rand -hex 32 > {path}`."
        )
    return token


def _right(home: Path, *, start: bool) -> OfficeRight:
    """The studio's right at its office; the first one is waited for where the system starts the office."""
    from sublet.studio.right import find_right

    is_reported = False
    while True:
        try:
            return find_right(home, start=start)
        except Disconnected:
            if start:
                raise
            if not is_reported:
                print("Waiting for the office.", flush=True)
                is_reported = True
            time.sleep(WAIT_S)


def _interrupted(number: int, frame: object) -> None:
    """As Ctrl-C. The server, which has the signals to itself while it serves, hands them on when it has ended."""
    raise KeyboardInterrupt


def _serve(
    home: Path,
    listening: socket.socket,
    where: str,
    path: Path,
    settings: StudioSettings,
    hub_token: str,
    *,
    start: bool,
) -> None:
    from uvicorn import Config, Server

    from sublet.studio.connections import bounded_protocol
    from sublet.studio.hub_api import Hub
    from sublet.studio.hub_people import HubPeople
    from sublet.studio.service import Studio
    from sublet.studio.web import studio_app

    right = _right(home, start=start)
    made = Studio(home, right, settings, start=start)

    def failed(person: Person, error: SubletError) -> None:
        _log.warning("The sessions of %s cannot be looked at: %s", person.name, error)

    def office() -> None:
        try:
            made.start_office()
        except SubletError as error:
            _log.warning("No office could be started: %s", error)

    start_thread("studio_office", office)  # people are served meanwhile, and told that it is away
    people = made.repeat_requests(failed)  # a database that a full disk keeps closed is found before people come
    print(f"The studio is up: pid {os.getpid()}, {where}. Ctrl-C ends it; leases go on.", flush=True)
    _log.info("Started.", extra=fields(event="started", pid=os.getpid(), address=where))
    if settings.hub_api is None and not people:
        print(typeable("There are no people yet: `sublet person add NAME --tenant TENANT`."), flush=True)
    hub, stopped = None, threading.Event()
    start_thread("studio_ends", partial(made.follow_ends, stopped, failed), again=True)
    if settings.hub_api is not None:
        hub_api = Hub(
            settings.hub_api, hub_token, settings.hub_service, answer_s=lambda: float(made.settings.hub_answer_s)
        )
        hub = HubPeople(made, hub_api, hub_token)
        start_thread("studio_hub", partial(hub.run, stopped), again=True)
    app = studio_app(made, hub)
    config = Config(
        app,
        http=bounded_protocol(listening, settings.connections_max),
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=GRACE_S,
    )

    class StreamsEndFirst(Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            app.state.end_streams()
            await super().shutdown(sockets)

    server = StreamsEndFirst(config)
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()  # what is loaded lives to the end
    gc.set_threshold(*COLLECT_AFTER)

    async def serve() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _read_again, made, path)
        await server.serve(sockets=[listening])

    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(serve())


def _read_again(studio: Studio, path: Path) -> None:
    """What the file says now; with a mistake in it, or where it cannot be read, what held holds."""
    try:
        settings = read_settings(path)
    except SubletError as error:
        _log.warning("The settings stay as they were: %s", error)
        return
    changed = changes(studio.settings, settings)
    studio.apply(settings)
    _log.info("%s was read again: %s", path, " ".join(changed) or "nothing has changed.")
