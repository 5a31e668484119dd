"""How a command of this installation is typed: ``sublet``, or its path where the shell would not find it.

Messages write commands as `` `sublet lease ls` ``, wherever they are made (the office may run in another environment
than the reader). What shows a message to a person passes it through ``typeable``, so the command works as printed.
"""

from __future__ import annotations

import os
import sys
from typing import Final

_NAME: Final = "sublet"


def program() -> str:
    """The words that start the command line of this installation: ``sublet``, ``.venv/bin/sublet``, or an interpreter
    and ``-m sublet`` where no script was installed."""
    import shlex  # 1 ms that only messages need

    script = _script()
    if not script:
        return f"{shlex.quote(_short(sys.executable))} -m {_NAME}" if sys.executable else _NAME
    found = _on_path(_NAME)
    if found and _is_same(found, script):
        return _NAME
    return shlex.quote(_short(script))


def typed(command: str) -> str:
    """A command as it is typed here: ``typed("sublet lease ls")``."""
    first, _, rest = command.partition(" ")
    if first != _NAME:
        raise ValueError(f"{command!r} is no command of {_NAME}")
    return f"{program()} {rest}".rstrip()


def typeable(text: str) -> str:
    """The text with each command in backticks as it is typed here."""
    if f"`{_NAME}" not in text:
        return text
    words = program()
    return text.replace(f"`{_NAME} ", f"`{words} ").replace(f"`{_NAME}`", f"`{words}`")


def installing(*needs: str) -> str:
    """The command that installs these packages beside this Sublet: ``installing("jupyterlab", "sublet[notebook]")``.

    An extra of ours is taken from where this installation came from (a clone, a wheel), as its metadata tell (PEP 610):
    by its name alone an index need not have it.
    """
    import shlex
    from importlib.util import find_spec

    words = [word for need in needs for word in _requirement(need)]
    python = sys.executable or "python3"
    if find_spec("pip") is not None:
        return shlex.join([python, "-m", "pip", "install", *words])
    return shlex.join(["uv", "pip", "install", "--python", python, *words])


def _requirement(need: str) -> list[str]:
    """What is written behind `pip install`."""
    name, bracket, extras = need.partition("[")
    if name != _NAME:
        return [need]
    url, is_folder, is_editable = _origin()
    if not url:
        return [need]
    if not is_folder:
        return [f"{need} @ {url}"]
    from urllib.parse import unquote, urlsplit

    path = unquote(urlsplit(url).path) + bracket + extras
    return ["--editable", path] if is_editable else [path]


def _origin() -> tuple[str, bool, bool]:
    """The URL of what was installed, whether it is a folder, and whether that is used in place."""
    import json
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        direct_url = json.loads(distribution(_NAME).read_text("direct_url.json") or "{}")
        return (
            str(direct_url.get("url", "")),
            "dir_info" in direct_url,
            bool(direct_url.get("dir_info", {}).get("editable")),
        )
    except (PackageNotFoundError, ValueError, AttributeError):
        return "", False, False


def _script() -> str:
    """The installed script: beside the interpreter, or the one that was started (``pip install --user`` puts it
    elsewhere)."""
    started = sys.argv[0] if getattr(sys, "argv", None) else ""
    beside = os.path.join(os.path.dirname(sys.executable), _NAME) if sys.executable else ""
    candidates = [beside, started if os.path.basename(started) == _NAME else "", _on_path(_NAME)]
    # A script on the PATH may be of another installation, unless this interpreter has none of its own beside it.
    return next((path for path in candidates if path and os.access(path, os.X_OK) and os.path.isfile(path)), "")


def _on_path(name: str) -> str:
    for folder in os.environ.get("PATH", os.defpath).split(os.pathsep):
        path = os.path.join(folder or os.curdir, name)
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return ""


def _is_same(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def _short(path: str) -> str:
    """Relative to the working folder where it lies below it, as a person would type it."""
    path = os.path.abspath(path)
    try:
        folder = os.getcwd()
    except OSError:  # the folder was removed
        return path
    below = os.path.relpath(path, folder)
    # A bare name would be looked up on the PATH, and from / everything lies below.
    is_short = folder != os.sep and os.sep in below and not below.startswith(os.pardir + os.sep)
    return below if is_short else path
