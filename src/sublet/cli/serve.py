"""``sublet studio serve``: a program that answers HTTP requests under leases."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from sublet.cli.declare import Arg, Opt, UsageError
from sublet.cli.exit_status import DONE
from sublet.cli.parsing import count, duration, name, size, vram
from sublet.cli.studio import BACKLOG, GRACE_S, listening_on
from sublet.errors import InvalidRequest, Unsupported
from sublet.invocation import installing
from sublet.studio.config import parse_address
from sublet.values import MIB, Exclusivity, Tier, valid_name

ADDRESS = ("127.0.0.1", 8330)


def serve(
    *,
    app: Annotated[str, Arg("FILE", help="Python file with a function `handle`, or an ASGI application `app`.")],
    gpu: Annotated[int, Opt("--vram", "--gpu", metavar="SIZE", parse=vram, help="GPU memory, such as 8GiB.")],
    session: Annotated[
        str | None,
        Opt("--name", metavar="NAME", parse=name, help="Name of the session (default: that of the file)."),
    ] = None,
    listen: Annotated[
        Any,  # a host and a port
        Opt(
            "--listen",
            metavar="HOST:PORT",
            parse=parse_address,
            help="Loopback address to listen on (default: 127.0.0.1:8330).",
        ),
    ] = ADDRESS,
    at: Annotated[
        str | None, Opt("--socket", metavar="PATH", help="Unix socket to listen on, in place of an address.")
    ] = None,
    volume: Annotated[
        int, Opt("--volume", metavar="SIZE", parse=size, help="Size of the volume for saved state (default: 256MiB).")
    ] = 256 * MIB,
    idle: Annotated[
        float | None,
        Opt(
            "--idle",
            metavar="DURATION",
            parse=duration,
            help="Time without a request after which the lease ends (default: 5m).",
        ),
    ] = None,
    concurrent: Annotated[
        int,
        Opt("--concurrent", metavar="N", parse=count, help="Maximum number of requests at once (default: 8)."),
    ] = 8,
    patience: Annotated[
        float,
        Opt("--wait", metavar="DURATION", parse=duration, help="Longest wait of a request for a GPU (default: 20s)."),
    ] = 20.0,
    answer: Annotated[
        float, Opt("--timeout", metavar="DURATION", parse=duration, help="Time-out of an answer (default: 1m).")
    ] = 60.0,
    tier: Annotated[
        str, Opt("--tier", choices=[t.value for t in Tier], help="Scheduling tier (default: interactive).")
    ] = Tier.INTERACTIVE.value,
) -> int:
    """Serve a program over HTTP, with a GPU while requests come.

    The first request acquires a lease and starts the program under it. Without requests the lease ends, and the next
    request takes another; what the program saved is restored. A request that gets no GPU in time is answered 503, with
    its place in the queue. Runs until Ctrl-C.
    """
    path = Path(app)
    if not path.is_file():
        raise InvalidRequest(f"{app} is no file", do="Give the Python file that is to be served.")
    called = session if session is not None else valid_name(path.stem.lower(), "name of the session")
    try:
        import uvicorn  # noqa: F401
    except ImportError:
        raise Unsupported(
            "uvicorn is not installed beside this Sublet", do=f"Install it: `{installing('sublet[studio]')}`."
        ) from None
    if at is not None and listen != ADDRESS:
        raise UsageError("--listen and --socket contradict each other", do="Give one of them.")
    with listening_on(listen, at, mode=0o600) as (listening, where), contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(path, called, gpu, volume, idle, tier, concurrent, patience, answer, listening, where))
    return DONE


async def _serve(
    path: Path,
    called: str,
    gpu: int,
    volume: int,
    idle: float | None,
    tier: str,
    concurrent: int,
    patience: float,
    answer: float,
    listening: Any,
    where: str,
) -> None:
    from uvicorn import Config, Server

    from sublet.client.fabric import connect
    from sublet.studio.connections import bounded_protocol
    from sublet.studio.records import Terms
    from sublet.studio.serve import ServedProgram
    from sublet.studio.serving import Limits

    terms = Terms(
        vram=gpu, ttl_s=idle, tier=tier, exclusivity=Exclusivity.DEVICE.value
    )  # it saves, and is not suspended
    limits = Limits(concurrent=concurrent, patience_s=patience, answer_s=answer)
    with await asyncio.to_thread(connect) as fabric:
        program = ServedProgram(path, fabric, called, terms, limits, volume_bytes=volume)
        print(f"{path.name} is served: pid {os.getpid()}, {where}, session {called}. Ctrl-C ends it.", flush=True)
        config = Config(
            program,
            http=bounded_protocol(listening),
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            log_level="critical",
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=GRACE_S,
            backlog=BACKLOG,
        )
        try:
            with _ended_by_signal():
                await Server(config).serve(sockets=[listening])
        finally:
            await program.close()


@contextlib.contextmanager
def _ended_by_signal() -> Iterator[None]:
    """The server ends in order at Ctrl-C and SIGTERM and raises them again when it has: then the program is to save."""
    before = {number: signal.signal(number, lambda number, frame: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
