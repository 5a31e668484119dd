"""Stores how ``sublet up`` started the office, so that a restart uses the same settings.

A program that starts an office without settings of its own (the first lease, a notebook, ``sublet lease ls``) after it
was killed, or after the machine went down, starts it with these: the same devices and sockets, and it stays. They are
written before the office answers for the first time, and read by the process that has the journal's lock.

The settings live from ``sublet up`` to ``sublet down``. An end that another cause may explain (a signal, a crash,
power) keeps them, and so does ``sublet down --keep``, which leaves leases on the devices they name.

The file is one line of JSON below a line with a checksum of it. Every shorter file, and every other one, is refused.
"""

from __future__ import annotations

import json
import os
import shlex
import stat
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Final

from sublet.errors import InvalidRequest, SubletError
from sublet.invocation import typed
from sublet.lazy_dataclass import dataclass
from sublet.logs import LogFormat
from sublet.node.agent.inventory import HostGpus, parse_host_gpus
from sublet.office.journal.files import publish, sync_file, sync_folder
from sublet.values import format_size, parse_size

SETTINGS_NAME: Final = "started-with"
_FORMAT: Final = "sublet-started-with 1"
_SIZE_MAX: Final = 4096
_DO: Final = "`sublet down` removes it; then start the office with `sublet up` and the devices that you want."


class SettingsUnusable(SubletError):
    """The file that says how the office was started cannot be read, written or removed."""


class OfficeDiffers(SubletError):
    """The office that runs, or is to come back, has other settings than those asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSettings:
    """What ``sublet up`` was told. An office with settings stays; one without ends when it is idle."""

    host_gpus: HostGpus | None = None
    """None: the cards of the machine, or without one a host device."""
    shared: Path | None = None
    """The folder of the sockets for every user of the machine; None: there are none."""
    log_format: LogFormat = LogFormat.TEXT
    """How its log is written. Nothing else depends on it, so it may be otherwise at the next start."""

    def command(self) -> str:
        """The command that starts such an office, as it is typed here."""
        return typed(" ".join(filter(None, ("sublet up", self.option_text()))))

    def option_text(self) -> str:
        """The options alone; empty if there are none."""
        form = "" if self.log_format is LogFormat.TEXT else f"--log-format {self.log_format}"
        return " ".join(filter(None, (host_gpus_words(self.host_gpus), shared_words(self.shared), form)))


def host_gpus_words(host_gpus: HostGpus | None) -> str:
    """The option as a person types it: ``--host-gpus 2x16GiB``; empty without one."""
    if host_gpus is None:
        return ""
    size = format_size(host_gpus.size)
    if parse_size(size, "size") != host_gpus.size:  # it was rounded
        size = f"{host_gpus.size}B"
    return f"--host-gpus {host_gpus.count}x{size}" + (f"@{host_gpus.namespace}" if host_gpus.namespace else "")


def shared_words(shared: Path | None) -> str:
    """The option as a person types it: ``--shared /srv/sublet``; empty without one."""
    return "" if shared is None else f"--shared {shlex.quote(os.fspath(shared))}"


def agreed(
    home: Path, wanted_gpus: HostGpus | None, shared: Path | None = None, log_format: LogFormat | None = None
) -> StartSettings:
    """The settings to start with: the remembered ones, else those asked for. The format of the log may change.

    Raises ``OfficeDiffers`` if other ones are asked for than are remembered.
    """
    kept = read_settings(home)
    wanted = StartSettings(host_gpus=wanted_gpus, shared=shared, log_format=log_format or LogFormat.TEXT)
    if kept is None:
        return wanted
    if (wanted_gpus is not None and wanted_gpus != kept.host_gpus) or (shared is not None and shared != kept.shared):
        raise OfficeDiffers(
            f"the office of {home} was started with `{kept.command()}`, not with {wanted.option_text()}, and was not "
            "ended since by `sublet down`",
            do=f"Start it as it was with `sublet up`; or forget that with `sublet down`, then `{wanted.command()}`.",
        )
    return kept if log_format is None else replace(kept, log_format=log_format)


def read_settings(home: Path) -> StartSettings | None:
    """The remembered settings; None if there are none. Raises ``SettingsUnusable`` for a file that is none of ours."""
    path = home / SETTINGS_NAME
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable(path, f"cannot be read ({error.strerror})") from error
    try:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid():
            raise _unusable(path, "is not a file of yours")
        data = os.read(fd, _SIZE_MAX + 1)
    except OSError as error:
        raise _unusable(path, f"cannot be read ({error.strerror})") from error
    finally:
        os.close(fd)
    return _decoded(path, data)


def write_settings(home: Path, settings: StartSettings) -> None:
    """Durable when it returns. What is there already is not written anew: that may need room that there is not."""
    path, temporary = home / SETTINGS_NAME, home / f"{SETTINGS_NAME}.new"
    try:
        if read_settings(home) == settings:
            sync_file(path)
            sync_folder(home)
            return
        temporary.unlink(missing_ok=True)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(_encoded(settings))
        publish(temporary, path)
    except OSError as error:
        raise SettingsUnusable(
            f"{path} cannot be written ({error.strerror}), so the office would not come back as it was started",
            do="Make room there, or set SUBLET_HOME to another folder.",
        ) from error


def forget_settings(home: Path) -> bool:
    """The next office starts as a new one. Whether there was anything to forget, readable or not."""
    try:
        (home / SETTINGS_NAME).unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise SettingsUnusable(
            f"{home / SETTINGS_NAME} cannot be removed ({error.strerror})", do="Remove it by hand."
        ) from error
    return True


def _encoded(settings: StartSettings) -> bytes:
    host_gpus = None if settings.host_gpus is None else str(settings.host_gpus)
    fields = {"host_gpus": host_gpus}
    if settings.shared is not None:
        fields["shared"] = os.fspath(settings.shared)
    if settings.log_format is not LogFormat.TEXT:
        fields["log_format"] = settings.log_format.value
    body = json.dumps(fields).encode() + b"\n"
    return f"{_FORMAT} {zlib.crc32(body):08x}\n".encode() + body


def _decoded(path: Path, data: bytes) -> StartSettings:
    head, _, body = data.partition(b"\n")
    if head != f"{_FORMAT} {zlib.crc32(body):08x}".encode():
        raise _unusable(path, "is damaged, or was not written by this version of Sublet")
    try:
        fields = json.loads(body)
        host_gpus, shared = fields["host_gpus"], fields.get("shared")
        return StartSettings(
            host_gpus=None if host_gpus is None else parse_host_gpus(host_gpus),
            shared=None if shared is None else Path(shared),
            log_format=LogFormat(fields.get("log_format", LogFormat.TEXT)),
        )
    except (ValueError, KeyError, TypeError, AttributeError, InvalidRequest) as error:
        raise _unusable(path, "names no settings that this version of Sublet knows") from error


def _unusable(path: Path, why: str) -> SettingsUnusable:
    return SettingsUnusable(f"{path}, which says how the office was started, {why}", do=_DO)
