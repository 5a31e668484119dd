"""Installs a kernelspec for a kernel whose cells run on a device (``kernel_mode``)."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from sublet.errors import InvalidRequest, NotFound, Unsupported
from sublet.invocation import installing
from sublet.notebook.options import parse_line

MODULE: Final = "sublet.notebook.kernel_mode"
_NAME: Final = re.compile(r"[a-z0-9._-]{1,64}")
_LOGO: Final = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 64 64">
<rect x="6" y="6" width="52" height="52" rx="9" fill="#1f2937"/>
<path d="M32 15a17 17 0 1 1-14.7 8.5" fill="none" stroke="#22c55e" stroke-width="5" stroke-linecap="round"/>
<path d="M32 22v11l7 5" fill="none" stroke="#f9fafb" stroke-width="4" stroke-linecap="round" stroke-linejoin="round"/>
</svg>
"""
"""A clock that runs: what is lent is lent for a time."""


def kernel_json(options: Sequence[str], *, python: str = sys.executable) -> dict[str, Any]:
    """What Jupyter reads. Raises ``InvalidRequest`` for options that ``%%gpu`` does not have."""
    asked = parse_line(shlex.join(options))
    return {
        "argv": [python, "-m", MODULE, "-f", "{connection_file}", "--", *options],
        "display_name": f"Python on a leased GPU ({asked})" if options else "Python on a leased GPU",
        "language": "python",
        "interrupt_mode": "signal",
        "metadata": {"debugger": False},
    }


def install(name: str, options: Sequence[str], *, user: bool = False, prefix: str | None = None) -> Path:
    """Put it where Jupyter looks; its folder. One of ours of the same name is replaced, another one never."""
    if importlib.util.find_spec("ipykernel") is None:
        raise _needs("ipykernel")
    spec = kernel_json(options)
    target = folder_of(name, user=user, prefix=prefix)
    if target.exists() and not _is_ours(target):
        raise InvalidRequest(
            f"there is a kernel {name!r} in {target} that is not Sublet's", do="Choose another --name."
        )
    made = target.with_name(f".{name}.{os.getpid()}")
    try:
        made.mkdir(parents=True)
        (made / "kernel.json").write_text(json.dumps(spec, indent=1) + "\n")
        (made / "logo-svg.svg").write_text(_LOGO)
        if target.exists():
            shutil.rmtree(target)
        made.rename(target)
    except OSError as error:
        shutil.rmtree(made, ignore_errors=True)
        raise Unsupported(
            f"{target} cannot be written ({error.strerror})", do="Give --user, or --prefix with a folder of yours."
        ) from error
    return target


def uninstall(name: str, *, user: bool = False, prefix: str | None = None) -> Path:
    """Take it away; the folder it was in."""
    target = folder_of(name, user=user, prefix=prefix)
    if not target.exists():
        raise NotFound(f"there is no kernel {name!r} in {target.parent}", do="See `jupyter kernelspec list`.")
    if not _is_ours(target):
        raise InvalidRequest(
            f"the kernel {name!r} in {target} is not Sublet's", do=f"See `jupyter kernelspec remove {name}`."
        )
    shutil.rmtree(target)
    return target


def folder_of(name: str, *, user: bool = False, prefix: str | None = None) -> Path:
    """Where a kernel of this name is, or would be: below ``prefix``, or the user's, or where neither is said those of
    the environment that this Python belongs to (the user's, where there is none)."""
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{name!r} cannot be the name of a kernel", do="Use small letters, digits, dots, hyphens and underscores."
        )
    if user and prefix is not None:
        raise InvalidRequest("--user and --prefix contradict each other", do="Give one of them.")
    if prefix is None and not user and sys.prefix != sys.base_prefix:
        prefix = sys.prefix
    if prefix is not None:
        return Path(prefix).expanduser().absolute() / "share" / "jupyter" / "kernels" / name
    return _users_folder() / name


def _users_folder() -> Path:
    try:
        from jupyter_core.paths import jupyter_data_dir
    except ImportError as error:
        raise _needs("jupyter_core") from error
    return Path(jupyter_data_dir()) / "kernels"


def _needs(module: str) -> Unsupported:
    return Unsupported(
        f"{sys.executable} has no {module}, which a kernel needs",
        do=f"Install it: `{installing('sublet[notebook]')}`.",
    )


def _is_ours(folder: Path) -> bool:
    try:
        return MODULE in json.loads((folder / "kernel.json").read_text())["argv"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
