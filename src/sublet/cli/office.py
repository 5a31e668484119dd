"""``sublet up`` and ``sublet down``: the life of the office of this machine."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Final

from sublet.cli.declare import Opt, UsageError
from sublet.cli.exits import DONE
from sublet.cli.parsing import AsJson
from sublet.cli.show import Json, document, plural, visible
from sublet.client.home import home_dir
from sublet.client.office import ensure_office
from sublet.errors import Disconnected, InvalidRequest, SubletError, Unsupported
from sublet.invocation import typed
from sublet.values import Kind, format_size

if TYPE_CHECKING:
    from sublet.agent.inventory import HostGpus
    from sublet.cli.call import Office

__all__ = ["OfficeDiffers", "OfficeInUse", "down", "end_office", "up"]

GONE_S: Final = 90.0
"""How long `down` waits for the process to end. Draining takes the longest notice, half a minute."""
_LOOK_EVERY_S: Final = 0.05


class OfficeDiffers(SubletError):
    """An office runs, and it is not the one that was asked for."""


class OfficeInUse(SubletError):
    """It has live leases, and nobody said what becomes of them."""


def host_gpus_of(text: str) -> HostGpus:
    """``2x16GiB``: so many host devices of this size."""
    from sublet.agent.inventory import parse_host_gpus

    return parse_host_gpus(text)


def up(
    *,
    foreground: Annotated[
        bool, Opt("--foreground", help="Run in this terminal until Ctrl-C (default: in the background).")
    ] = False,
    host_gpus: Annotated[
        Any,  # a HostGpus, or None: annotations are read at each start, and its class would have to be loaded for it
        Opt(
            "--host-gpus",
            metavar="NxSIZE[@NAME]",
            parse=host_gpus_of,
            help="Host devices to lease in place of GPUs, such as 2x16GiB. With a name, such as 2x16GiB@lab, offices "
            "of this machine share them (default without a GPU: one with half of the memory).",
        ),
    ] = None,
    embedded: Annotated[
        bool, Opt("--embedded", hidden=True, help="Stay in the foreground, and end after ten idle minutes.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Start the office of this machine, and return when it answers.

    The first lease starts an office too, which ends after ten idle minutes; one that `up` started stays. A second `up`
    with the same settings succeeds.
    """
    if os.environ.get("SUBLET_URL"):
        raise UsageError(
            "SUBLET_URL names an office elsewhere, and `up` starts the one of this machine", do="Unset SUBLET_URL."
        )
    if sys.platform != "linux":
        raise Unsupported(
            "an office runs on Linux only", do="Set SUBLET_URL to the address of one that runs elsewhere."
        )
    if embedded:  # who started it has looked whether one runs, and waits
        return _serve(None if host_gpus is None else str(host_gpus), embedded=True)
    office = _office()
    running = _status_or_none(office)
    if foreground:
        if running is not None:
            raise OfficeDiffers(
                f"an office runs already for {visible(running['home'])}: pid {running['pid']}",
                do="Use that one, or end it with `sublet down` first.",
            )
        return _serve(None if host_gpus is None else str(host_gpus), embedded=False)
    _check_same(running, host_gpus)
    if running is not None and running["embedded"]:
        _replace(office, running)
        running = None
    if running is None:
        words = ["up", "--foreground"]
        ensure_office(home_dir(), words=words if host_gpus is None else [*words, "--host-gpus", str(host_gpus)])
    view: Json = office.get("/v1/status")
    _check_same(view, host_gpus)  # somebody else may have been quicker, with other settings
    if as_json:
        document(view)
    else:
        devices = [device for device in view["devices"] if device["kind"] == Kind.GPU]
        kind = "host device (no GPU)" if all(device["host"] for device in devices) else "GPU"
        said = "is up" if running is None else "was up already"
        print(f"The office {said}: pid {view['pid']}, {len(devices)} × {kind}.")
        print(f"  Acquire a lease: {typed('sublet lease acquire --gpu 1GiB')}")
    return DONE


def down(
    *,
    drain: Annotated[bool, Opt("--drain", help="Give all holders notice and end after the last lease.")] = False,
    keep: Annotated[bool, Opt("--keep", help="End only the office; leases last until their deadlines.")] = False,
    now: Annotated[bool, Opt("--now", help="End all leases at once.")] = False,
    as_json: AsJson = False,
) -> int:
    """End the office of this machine.

    It is refused while leases live, unless --drain, --keep or --now is given.
    """
    given = [word for word, said in (("drain", drain), ("keep", keep), ("now", now)) if said]
    if len(given) > 1:
        raise UsageError(f"--{given[0]} and --{given[1]} contradict each other", do="Give one of them.")
    office = _office()
    running = _status_or_none(office)
    if running is None:
        if as_json:
            document({"pid": None, "leases": 0})
        else:
            print("No office is running.")
        return DONE
    answer = end_office(office, running, given[0] if given else "idle")
    if as_json:
        document({"pid": running["pid"], "leases": answer["leases"]})
    else:
        live = answer["leases"]
        kept = f", and {plural(live, 'lease')} {'goes' if live == 1 else 'go'} on" if keep and live else ""
        print(f"The office has ended (pid {running['pid']}){kept}.")
    return DONE


def _office() -> Office:
    from sublet.cli.call import Office  # an office does without it

    return Office.reach(start=False)


def _status_or_none(office: Office) -> Json | None:
    from sublet.cli.call import NoOffice

    try:
        view: Json = office.get("/v1/status")
    except NoOffice:
        return None
    return view


def _check_same(running: Json | None, host_gpus: HostGpus | None) -> None:
    """An office that runs must have what is asked for now, or it is not the one that is meant."""
    if running is None or host_gpus is None:
        return
    there = {d["id"]: d["capacity"] for d in running["devices"] if d["kind"] == Kind.GPU}
    wanted = {str(device.id): device.capacity for device in host_gpus.devices()}
    if there != wanted:
        said, meant = _sizes(there), _sizes(wanted)
        if said == meant:  # the same sizes under other names
            said, meant = " and ".join(there), " and ".join(wanted)
        raise OfficeDiffers(
            f"the office that runs (pid {running['pid']}) has other settings: devices {said}, not {meant}",
            do="Use it as it is, or end it with `sublet down` and start it anew.",
        )


def _serve(host_gpus: str | None, *, embedded: bool) -> int:
    """Be the office, until told to end."""
    from sublet.cli.sparing import spare

    spare()
    from sublet.clock import SystemClock
    from sublet.engines.beginning import begun

    home = home_dir()

    def say() -> None:
        if not embedded:
            print(
                f"The office is up: pid {os.getpid()}, {home}. Ctrl-C ends it; leases go on to their deadlines.",
                flush=True,
            )

    with begun(home, SystemClock()) as beginning:  # it comes up while the rest is loaded
        from sublet.engines.local import run_office

        return run_office(home, host_gpus=host_gpus, embedded=embedded, ready=say, beginning=beginning)


def _sizes(devices: dict[str, int]) -> str:
    sizes = list(devices.values())
    return " and ".join(f"{sizes.count(size)}x{format_size(size)}" for size in sorted(set(sizes))) or "none"


def _replace(office: Office, running: Json) -> None:
    """An office that started by itself would end by itself, and that is not what `up` promises: start it anew."""
    if running["live"] or running["queued"]:
        raise OfficeDiffers(
            f"the office that runs (pid {running['pid']}) started by itself, ends after ten idle minutes, "
            "and is in use now",
            do="Try again when its leases have ended, or end it with `sublet down --drain`.",
        )
    end_office(office, running, "idle")


def end_office(office: Office, running: Json, how: str) -> Json:
    """End it and see it gone: then its journal is closed, and another office may open it."""
    pid: int = running["pid"]
    with _watched(office, pid) as gone:
        try:
            answer: Json = office.post("/v1/down", {"how": how})
        except InvalidRequest as error:  # a well-formed wish that the office does not grant
            raise OfficeInUse(f"the office does not end: {error.message}", do=error.do) from error
        until = time.monotonic() + GONE_S
        while not gone(_LOOK_EVERY_S):
            if time.monotonic() > until:
                raise Disconnected(
                    f"the office (pid {pid}) was asked to end, and has not after {GONE_S:.0f} s",
                    do="See `sublet lease ls` for what it may be waiting for.",
                )
    return answer


@contextlib.contextmanager
def _watched(office: Office, pid: int) -> Iterator[Callable[[float], bool]]:
    """A question: has it ended, or does it within so many seconds? It is asked through a descriptor of the process,
    which cannot come to mean another one; elsewhere a pid means nothing, so there it is asked for an answer."""
    if office.address.socket is None:

        def silent(within_s: float) -> bool:
            try:
                office.get("/v1/hello")
            except Disconnected:
                return True
            time.sleep(within_s)
            return False

        yield silent
        return
    handle = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    try:
        yield lambda within_s: bool(poll.poll(within_s * 1000))
    finally:
        os.close(handle)
