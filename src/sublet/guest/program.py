"""Starts a Python program inside a running interpreter as ``python`` itself would.

A script, ``-m module`` and ``-c command`` see the same ``sys.argv``, ``sys.path``, ``__main__`` and exit as when the
interpreter was started for them. An entry point, ``package.module:callable``, is found with the working folder first on
the search path, as ``-m`` finds modules.

What cannot be the same in an interpreter that was warm before: modules it has imported are there already, the seed of
the hashes of texts is the warm interpreter's, and options of the interpreter (``-O``, ``-X``) are those it was started
with.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.machinery
import io
import json
import linecache
import os
import sys
import types
from collections.abc import Callable
from dataclasses import field
from typing import Any, Final

from sublet.errors import InvalidRequest
from sublet.lazy_dataclass import dataclass

_ENTRY_DO: Final = "Write it as package.module:callable, such as train.loop:main."


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What to run: ``argv`` as after ``python`` on a command line, or an entry point with its arguments as JSON."""

    argv: tuple[str, ...] = ()
    entry: str = ""
    args: str = ""
    safe_path: bool = field(default_factory=lambda: sys.flags.safe_path)
    """Whether its own folder stays off ``sys.path``, as with ``-P``; a warm interpreter has flags of its own."""

    @property
    def name(self) -> str:
        """For people."""
        return self.entry or " ".join(self.argv)

    def run(self) -> None:
        """Run it in this process, to its end. What it raises comes out, ``SystemExit`` among it."""
        if self.entry:
            self._run_entry()
        elif not self.argv or self.argv[0] == "-":
            raise InvalidRequest("there is no program to run", do="Name a script, -m module, -c command or an entry.")
        elif self.argv[0] == "-m":
            self._run_module(*self._after("-m"))
        elif self.argv[0] == "-c":
            command, rest = self._after("-c")
            _set_up(["-c", *rest], "", shown=not self.safe_path)
            code = compile(command, "<string>", "exec")
            _show_lines(code, command)
            _execute(_new_main(), code)
        else:
            self._run_script()

    def _after(self, option: str) -> tuple[str, tuple[str, ...]]:
        if len(self.argv) < 2:
            raise InvalidRequest(f"{option} says nothing to run", do=f"Give what to run after {option}.")
        return self.argv[1], self.argv[2:]

    def _run_entry(self) -> None:
        function, keywords = read_entry(self.entry, self.args)
        _set_up([self.entry], os.getcwd(), shown=not self.safe_path)
        _new_main()
        _resolve(function, self.entry)(**keywords)

    def _run_module(self, module: str, rest: tuple[str, ...]) -> None:
        import runpy

        _set_up(["-m", *rest], os.getcwd(), shown=not self.safe_path)
        _new_main()
        runpy._run_module_as_main(module)  # type: ignore[attr-defined]  # the interpreter's own way to begin `-m`

    def _run_script(self) -> None:
        path, *rest = self.argv
        if os.path.isdir(path) or _is_archive(path):
            import runpy

            _set_up([path, *rest], path, shown=True)
            _new_main()
            runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]  # as above
            return
        _set_up([path, *rest], os.path.dirname(os.path.realpath(path)), shown=not self.safe_path)
        path = os.path.join(os.getcwd(), path)
        try:
            with io.open_code(path) as file:
                source = file.read()
        except OSError as error:
            _print(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {os.strerror(error.errno or 0)}")
            raise SystemExit(2) from None
        main = _new_main()
        main.__file__ = path
        main.__dict__["__cached__"] = None
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
        _execute(main, compile(source, path, "exec"))


def read_entry(entry: str, args: str) -> tuple[tuple[str, str], dict[str, Any]]:
    """Module, name and arguments of an entry point. Raises ``InvalidRequest``."""
    module, colon, name = entry.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise InvalidRequest(f"{entry!r} is not an entry point", do=_ENTRY_DO)
    try:
        keywords = json.loads(args) if args else {}
    except ValueError as error:
        raise InvalidRequest(f"the arguments of {entry} are no JSON: {error}", do="Give a JSON object.") from None
    if not isinstance(keywords, dict):
        raise InvalidRequest(f"the arguments of {entry} are no JSON object", do='Write them as {"name": value}.')
    return (module, name), keywords


def _resolve(function: tuple[str, str], entry: str) -> Callable[..., object]:
    found: Any = importlib.import_module(function[0])
    for part in function[1].split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise InvalidRequest(f"{function[0]} has no {function[1]}", do=_ENTRY_DO) from None
    if not callable(found):
        raise InvalidRequest(f"{entry} cannot be called", do=_ENTRY_DO)
    chosen: Callable[..., object] = found
    return chosen


def _set_up(argv: list[str], first: str, *, shown: bool) -> None:
    """``sys.argv``, and the folder a program finds its own modules in (not with ``-P`` or ``-I``)."""
    sys.argv[:] = argv
    if shown:
        sys.path.insert(0, first)


def _new_main() -> types.ModuleType:
    """A fresh ``__main__``: nothing of the warm interpreter's or the bootstrap's is left in it."""
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={}, __loader__=importlib.machinery.BuiltinImporter)
    sys.modules["__main__"] = main
    return main


def _execute(main: types.ModuleType, code: types.CodeType) -> None:
    exec(code, main.__dict__)  # noqa: S102 - the program whose guest this is


def _show_lines(code: types.CodeType, command: str) -> None:
    """From 3.13 on a traceback shows the lines of a ``-c`` command; else it would show those we were begun with."""
    known: Any = linecache
    if hasattr(known, "_interactive_cache"):
        known._register_code(code, command, "<string>")
    elif "<string>" in known.cache:
        known.cache["<string>"] = (len(command), None, [f"{line}\n" for line in command.splitlines()], "<string>")


def _is_archive(path: str) -> bool:
    if not os.path.isfile(path):
        return False
    import zipfile

    return not path.endswith((".py", ".pyw")) and zipfile.is_zipfile(path)


def _print(line: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(line + "\n")
