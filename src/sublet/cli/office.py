"""``sublet up`` and ``sublet down``: start and end the office of this machine."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from sublet.cli.declare import Opt, UsageError
from sublet.cli.exit_status import DONE
from sublet.cli.parsing import AsJson
from sublet.cli.show import Json, document, plural, visible
from sublet.client.home import home_dir
from sublet.client.office import ensure_office
from sublet.errors import Disconnected, InvalidRequest, SubletError, Unsupported
from sublet.invocation import typeable, typed
from sublet.lease.states import SliceState
from sublet.values import Kind, format_size

if TYPE_CHECKING:
    from sublet.cli.call import CommandOffice
    from sublet.node.agent.inventory import HostGpus

GONE_S: Final = 90.0
"""How long `down` waits for the process to end. Draining takes the longest notice, half a minute."""
_LOOK_EVERY_S: Final = 0.05


class OfficeInUse(SubletError):
    """It has live leases, and no option says what becomes of them."""


def host_gpus_of(text: str) -> HostGpus:
    """``2x16GiB``: so many host devices of this size."""
    from sublet.node.agent.inventory import parse_host_gpus

    return parse_host_gpus(text)


def shared_folder_of(text: str) -> Path:
    """The folder of ``--shared``; empty: the usual one."""
    from sublet.engines.shared_folder import parse_shared_folder

    return parse_shared_folder(text)


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
    shared: Annotated[
        Any,  # a Path, or None
        Opt(
            "--shared",
            metavar="FOLDER",
            parse=shared_folder_of,
            alone="",
            help="Let every user of this machine connect, through sockets in this folder (default for root: "
            "/run/sublet). They need an access token.",
        ),
    ] = None,
    log_format: Annotated[
        str | None,
        Opt("--log-format", choices=("text", "json"), help="Format of the office's log (default: text)."),
    ] = None,
    embedded: Annotated[
        bool, Opt("--embedded", hidden=True, help="Stay in the foreground, and end after ten idle minutes.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Start the office of this machine, and return when it answers.

    The first lease starts an office too, which ends after ten idle minutes; one that `up` started stays, and after a
    crash or a reboot it comes back with the same settings, until `sublet down`. A second `up` with the same settings
    succeeds.
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
        return _serve(host_gpus, shared, log_format, embedded=True)
    from sublet.engines.start_settings import OfficeDiffers, agreed

    office = _office()
    running = _status_or_none(office)
    if foreground:
        if running is not None:
            raise OfficeDiffers(
                f"an office runs already for {visible(running['home'])}: pid {running['pid']}",
                do="Use that one, or end it with `sublet down` first.",
            )
        return _serve(host_gpus, shared, log_format, embedded=False)
    _check_same(running, host_gpus, shared)
    if running is not None and running["embedded"]:
        _replace(office, running)
        running = None
    if running is None:
        settings = agreed(home_dir(), host_gpus, shared)
        words = ["up", "--foreground"]
        if settings.host_gpus is not None:
            words += ["--host-gpus", str(settings.host_gpus)]
        if settings.shared is not None:
            words += ["--shared", str(settings.shared)]
        if log_format is not None:
            words += ["--log-format", log_format]
        ensure_office(home_dir(), words=words)
    view: Json = office.get("/v1/status")
    _check_same(view, host_gpus, shared)  # another program may have been quicker, with other settings
    if as_json:
        document(view)
    else:
        devices = [d for d in view["devices"] if d["kind"] == Kind.GPU and d["state"] != SliceState.LOST]
        kind = "host device (no GPU)" if devices and all(device["host"] for device in devices) else "GPU"
        state = "is up" if running is None else "was up already"
        print(f"The office {state}: pid {view['pid']}, {len(devices)} × {kind}.")
        for node in view["nodes"]:
            if trouble := node["labels"].get("gpu-trouble"):
                print(f"  Not lent: {visible(trouble)}")
                print(f"  What to do: {typed('sublet doctor --gpu')}")
        print(f"  Acquire a lease: {typed('sublet lease acquire --gpu 1GiB')}")
        if view.get("shared"):
            print(f"  Other users set SUBLET_URL=unix://{visible(view['shared'])}/office.sock and SUBLET_TOKEN.")
    return DONE


def down(
    *,
    drain: Annotated[bool, Opt("--drain", help="Give all holders notice and end after the last lease.")] = False,
    keep: Annotated[bool, Opt("--keep", help="End only the office; leases last until their deadlines.")] = False,
    now: Annotated[bool, Opt("--now", help="End all leases at once.")] = False,
    as_json: AsJson = False,
) -> int:
    """End the office of this machine.

    It is refused while leases live, unless --drain, --keep or --now is given. The next office starts anew, with what
    the next `up` says; with --keep it comes back as this one was started.
    """
    given = [word for word, is_given in (("drain", drain), ("keep", keep), ("now", now)) if is_given]
    if len(given) > 1:
        raise UsageError(f"--{given[0]} and --{given[1]} contradict each other", do="Give one of them.")
    office = _office()
    running = _status_or_none(office)
    if running is None and not keep:
        running = _with_what_goes_on(office)
    if running is None:
        forgotten = "" if keep else _forgotten(office)
        if as_json:
            document({"pid": None, "leases": 0})
        else:
            print(f"No office is running.{forgotten}")
        return DONE
    answer = end_office(office, running, given[0] if given else "idle")
    if as_json:
        document({"pid": running["pid"], "leases": answer["leases"]})
    else:
        live = answer["leases"]
        kept = f", and {plural(live, 'lease')} {'goes' if live == 1 else 'go'} on" if keep and live else ""
        print(f"The office has ended (pid {running['pid']}){kept}.")
        if running["quarantined"]:
            held = plural(running["quarantined"], "slice")
            print(f"Its supervisor stays for {held} in quarantine: no other office gets what was not seen to be clean.")
            print(typeable("`sublet up` and `sublet fence ls` show it."))
    return DONE


def _office() -> CommandOffice:
    from sublet.cli.call import CommandOffice  # an office does without it

    return CommandOffice.reach(start=False)


def _status_or_none(office: CommandOffice) -> Json | None:
    from sublet.cli.call import NoOffice

    try:
        view: Json = office.get("/v1/status")
    except NoOffice:
        return None
    return view


def _with_what_goes_on(office: CommandOffice) -> Json | None:
    """Leases of an office that was killed may live on, on the devices of its settings: then it is started again as it
    was, so that its end is an ordinary one. None if there is nothing to end."""
    from sublet.cli.call import NoOffice, check_nothing_lives
    from sublet.engines.start_settings import SettingsUnusable, read_settings

    home = office.address.home
    if home is None:
        return None
    try:
        if read_settings(home) is None:
            return None
        check_nothing_lives(home)
    except SettingsUnusable:  # how it was started is not known
        return None
    except NoOffice:
        ensure_office(home)
        return _status_or_none(office)
    return None


def _forgotten(office: CommandOffice) -> str:
    home = office.address.home
    if home is None or not home.is_dir():
        return ""
    from sublet.engines.start_settings import SettingsUnusable, forget_settings, read_settings
    from sublet.office.journal.files import HomeLock

    try:
        settings = read_settings(home)
        text = "" if settings is None else f" It will not come back as `{settings.command()}`."
    except SettingsUnusable as error:
        text = f" A file is removed that could not be used: {error.message}."
    if text:
        lock = HomeLock.take(home)  # or an office runs that does not answer
        forget_settings(home)
        lock.release()
    return text


def _check_same(running: Json | None, host_gpus: HostGpus | None, shared: Path | None) -> None:
    """An office that runs must have been started with what is asked for now, or it is not the one that is meant."""
    if running is None:
        return
    same_gpus = host_gpus is None or running.get("host_gpus") == str(host_gpus)
    if same_gpus and (shared is None or running.get("shared") == str(shared)):
        return
    from sublet.engines.start_settings import OfficeDiffers, StartSettings

    had = StartSettings(
        host_gpus=host_gpus_of(running["host_gpus"]) if running.get("host_gpus") else None,
        shared=Path(running["shared"]) if running.get("shared") else None,
    )
    wanted = StartSettings(host_gpus=host_gpus, shared=shared)
    devices = ", ".join(
        f"{device['id'].rpartition('/')[2]} {format_size(device['capacity'])}"
        for device in running["devices"]
        if device["kind"] == Kind.GPU and device["state"] != SliceState.LOST
    )
    by = "started by itself" if running["embedded"] else f"was started with `{had.command()}`"
    raise OfficeDiffers(
        f"the office that runs (pid {running['pid']}) {by} and has {devices or 'no GPU'}"
        f"{' and no shared socket' if shared is not None and had.shared is None else ''}, "
        f"not {wanted.option_text()}",
        do=f"Use it as it is, or end it with `sublet down`, then `{wanted.command()}`.",
    )


def _serve(host_gpus: HostGpus | None, shared: Path | None, log_format: str | None, *, embedded: bool) -> int:
    """Be the office, until told to end. ``embedded``: it ends when it is idle, unless one that was started by `up` is
    to come back: then it is that one."""
    gc.disable()  # what is loaded stays: it is looked through once, at the end of the start
    from sublet.clock import SystemClock
    from sublet.engines.beginning import begun

    home = home_dir()
    with begun(home, SystemClock()) as beginning:  # it comes up while the rest is loaded
        import logging

        from sublet.engines.local import run_office
        from sublet.engines.start_settings import agreed, forget_settings, read_settings, write_settings
        from sublet.logs import LogFormat, fields, log_to_stderr

        # Only now, since the journal is ours: no other office starts here with other settings meanwhile.
        form = None if log_format is None else LogFormat(log_format)
        settings = agreed(home, host_gpus, shared, form)
        if settings.log_format is LogFormat.JSON:  # else as Python does it
            log_to_stderr("office", settings.log_format, info=("sublet.office",))
        stays = not embedded or read_settings(home) is not None

        def remember() -> None:
            if stays:
                write_settings(home, settings)

        def print_address() -> None:
            about = fields(event="started", pid=os.getpid(), home=str(home))
            logging.getLogger("sublet.office").info("Started.", extra=about)
            if stays:
                up = f"The office is up: pid {os.getpid()}, {home}. Ctrl-C ends it; leases go on to their deadlines."
                print(typeable(f"{up}\nUntil `sublet down` it comes back as `{settings.command()}`."), flush=True)

        return run_office(
            home,
            host_gpus=None if settings.host_gpus is None else str(settings.host_gpus),
            embedded=not stays,
            ready=print_address,
            beginning=beginning,
            before_serving=remember,
            shared=settings.shared,
            ended_for_good=lambda: forget_settings(home),
        )


def _replace(office: CommandOffice, running: Json) -> None:
    """An office that started by itself would end by itself, and that is not what `up` promises: start it anew."""
    if running["live"] or running["queued"]:
        from sublet.engines.start_settings import OfficeDiffers

        raise OfficeDiffers(
            f"the office that runs (pid {running['pid']}) started by itself, ends after ten idle minutes, "
            "and is in use now",
            do="Try again when its leases have ended, or end it with `sublet down --drain`.",
        )
    end_office(office, running, "idle")


def end_office(office: CommandOffice, running: Json, how: str) -> Json:
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
def _watched(office: CommandOffice, pid: int) -> Iterator[Callable[[float], bool]]:
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
