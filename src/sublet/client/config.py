"""A person's defaults: ``config.toml`` in the state folder, for ``%%gpu`` and ``sublet run``; see ``sublet config``.

    vram = "8GiB"
    ttl = "10m"
    shared = true

The file is flat: one ``key = value`` per line. An option of a command or a cell overrides the kernelspec's, and that
overrides this file. Programs do not use it: ``fabric.gpu()`` gets what it is called with.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from sublet.client.home import home_text
from sublet.errors import InvalidRequest
from sublet.values import Tier, parse_duration_ns, parse_size, shown

FILE: Final = "config.toml"
FILE_BYTES_MAX: Final = 64 * 1024


class ConfigKey(NamedTuple):
    """One setting that the file may have."""

    name: str
    check: Callable[[object], str | bool]
    """The value to keep. Raises ``InvalidRequest``."""
    default: str
    """Of who sets nothing, for people."""
    says: str
    flag: str
    """The option that it is the default of."""


class ConfigSetting(NamedTuple):
    """A value, and the line of the file that it is from."""

    value: str | bool
    line: int

    @property
    def shown(self) -> str:
        """As the file has it, without quotation marks."""
        return str(self.value).lower() if isinstance(self.value, bool) else self.value


def _text(value: object, what: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise InvalidRequest(
            f"{what} = {shown(value)} is not a text", do=f'Write it in quotation marks: {what} = "...".'
        )
    return str(value)


def _size(value: object) -> str:
    text = _text(value, "vram")
    parse_size(text, "vram")
    return text


def _duration(what: str) -> Callable[[object], str]:
    def check(value: object) -> str:
        text = _text(value, what)
        parse_duration_ns(text, what)
        return text

    return check


def _tier(value: object) -> str:
    tiers = [tier.value for tier in Tier]
    if value not in tiers:
        raise InvalidRequest(f"there is no tier {shown(value)}", do=f"Use one of {', '.join(tiers)}.")
    return str(value)


def _python(value: object) -> str:
    path = os.path.expanduser(_text(value, "python"))
    if not os.path.isabs(path):
        raise InvalidRequest(f"python = {shown(value)} is not a whole path", do="Write it from / on, or from ~/ on.")
    return path


def _switch(what: str) -> Callable[[object], bool]:
    def check(value: object) -> bool:
        if value not in (True, False, "true", "false"):
            raise InvalidRequest(
                f"{what} = {shown(value)} is neither true nor false", do=f"Write {what} = true or false."
            )
        return value in (True, "true")

    return check


KEYS: Final = {
    key.name: key
    for key in (
        ConfigKey("vram", _size, "1GiB", "GPU memory", "--vram"),
        ConfigKey("ttl", _duration("ttl"), "5m for a GPU", "time to live of a lease", "--ttl"),
        ConfigKey("tier", _tier, "interactive", "scheduling tier", "--tier"),
        ConfigKey("wait", _duration("wait"), "no limit", "longest wait in the queue", "--wait"),
        ConfigKey("shared", _switch("shared"), "false", "share the GPU with other leases of yours", "--shared"),
        ConfigKey(
            "smaller_ok", _switch("smaller_ok"), "false", "accept less memory if no more is free", "--smaller-ok"
        ),
        ConfigKey("python", _python, "the notebook's", "Python interpreter of %%gpu cells", "--python"),
    )
}


def config_path(home: str | None = None) -> str:
    """Where the file is, or would be."""
    return os.path.join(home_text(home), FILE)


_read: dict[str, tuple[tuple[int, int, int], dict[str, ConfigSetting]]] = {}
"""Path → what the file was when it was read, and what it said: cells ask each time."""


def read_config(path: str | None = None) -> dict[str, ConfigSetting]:
    """What is set. Empty if there is no file. Raises ``InvalidRequest``, which names file and line."""
    path = config_path() if path is None else path
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise _unreadable(path, error) from error
    now = (found.st_mtime_ns, found.st_size, found.st_ino)
    if path not in _read or _read[path][0] != now:
        _read[path] = (now, _parsed(path, _loaded(path)))
    return _read[path][1]


def set_config(key: str, value: str) -> str:
    """Set it in the file, whose other lines and comments stay; the file's path."""
    kept = _known(key).check(value)
    path = config_path()
    lines = _loaded(path).splitlines()
    _parsed(path, "\n".join(lines))  # a file with a mistake is corrected by hand
    line = f"{key} = {str(kept).lower() if isinstance(kept, bool) else _quoted(kept)}"
    at = _line_of(lines, key)
    lines[at - 1 : at] = [line] if at else []
    _write(path, lines if at else [*lines, line])
    return path


def unset_config(key: str) -> bool:
    """Remove it from the file, also if no such key exists; whether it was there."""
    path = config_path()
    lines = _loaded(path).splitlines()
    at = _line_of(lines, key)
    if not at:
        _known(key)
        return False
    _write(path, [*lines[: at - 1], *lines[at:]])
    return True


def _known(name: str) -> ConfigKey:
    if name not in KEYS:
        import difflib

        close = difflib.get_close_matches(name.replace("-", "_"), KEYS, n=1)
        meant = f"; did you mean {close[0]}?" if close else ""
        raise InvalidRequest(f"there is no setting {shown(name)}{meant}", do=f"There are {', '.join(KEYS)}.")
    return KEYS[name]


def _loaded(path: str) -> str:
    try:
        with open(path, "rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise _unreadable(path, error) from error
    if len(data) > FILE_BYTES_MAX:
        raise InvalidRequest(f"{path} has more than {FILE_BYTES_MAX} bytes", do="Shorten it.")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path} is not UTF-8 text (at byte {error.start})", do="Save it as UTF-8.") from error


def _parsed(path: str, text: str) -> dict[str, ConfigSetting]:
    import tomllib

    try:
        found: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidRequest(f"{path} is not TOML: {error}", do='Write lines such as: vram = "8GiB"') from error
    lines = text.splitlines()
    settings = {}
    for name, value in found.items():
        line = _line_of(lines, name)
        try:
            settings[name] = ConfigSetting(_known(name).check(value), line)
        except InvalidRequest as error:
            raise InvalidRequest(f"{path}:{line}: {error.message}", do=error.do) from error
    return settings


def _line_of(lines: list[str], key: str) -> int:
    """The 1-based line that sets the key, or begins its table; 0 if there is none."""
    name = rf"(?:{re.escape(key)}|\"{re.escape(key)}\"|'{re.escape(key)}')"
    pattern = re.compile(rf"\s*(?:\[+\s*{name}\s*[\].]|{name}\s*[.=])")
    return next((number for number, line in enumerate(lines, start=1) if pattern.match(line)), 0)


def _quoted(text: str) -> str:
    escaped = "".join(c if c.isprintable() and c not in '"\\' else f"\\u{ord(c):04x}" for c in text)
    return f'"{escaped}"'


def _write(path: str, lines: list[str]) -> None:
    """Replace the file in one step: a reader sees the old one or the new one."""
    from pathlib import Path

    from sublet.client.home import make_private_dir

    text = "".join(f"{line}\n" for line in lines)
    _parsed(path, text)
    folder = make_private_dir(Path(path).parent)
    made = folder / f".{FILE}.{os.getpid()}"
    try:
        with open(made, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(made, path)
    except OSError as error:
        made.unlink(missing_ok=True)
        raise InvalidRequest(f"{path} cannot be written ({error.strerror})", do="See that there is room.") from error


def _unreadable(path: str, error: OSError) -> InvalidRequest:
    return InvalidRequest(f"{path} cannot be read ({error.strerror})", do="See its owner and permissions.")
