"""The fast parser, for a command line that is complete and correct.

It explains nothing. Whatever it cannot take, such as an unknown option, a missing argument or ``--help``, is left to
``full``, which has typer and the time to be helpful. Then a correct command pays for neither. Why not ``argparse``: it
takes 7 ms to load, a fifth of what lies between the prompt and the first line of `sublet run`'s command.
"""

from __future__ import annotations

import typing
from collections.abc import Sequence
from typing import Final

from sublet.cli.declare import Command, Opt, Param, Raw, Shape, UsageError

LIKE_OURS: Final = 0.82
"""``--spto`` is so like ``--spot``; ``--epochs`` is not like any of ours."""


class NotUnderstood(Exception):
    """Leave it to the full way in."""


def parse(command: Command, words: Sequence[str]) -> Raw:
    """The raw texts of a command line, or ``NotUnderstood``."""
    return _Reading(command).read(words)


def option_names(command: Command) -> set[str]:
    """Every option the short way knows, for the test that compares both."""
    return set(_Reading(command).options)


class _Reading:
    """One walk over the words of one command."""

    def __init__(self, command: Command) -> None:
        self.options: dict[str, Param] = {}
        self._path = command.path
        self._arguments: list[Param] = []
        self._raw: dict[str, object] = {}
        for param in command.params:
            self._raw[param.name] = {Shape.FLAG: False, Shape.ONE: None, Shape.MANY: []}[param.shape]
            if isinstance(param.spec, Opt):
                self.options.update(dict.fromkeys(param.spec.flags, param))
            else:
                self._arguments.append(param)
        self._missing = {param.name for param in command.params if param.required}

    def read(self, words: Sequence[str]) -> Raw:
        """Options anywhere, until ``--`` or the first word of the command to run."""
        rest = list(words)
        may_be_option = True
        while rest:
            word = rest.pop(0)
            if may_be_option and word == "--":
                may_be_option = False
                if self._arguments and self._arguments[0].is_rest:
                    self._take_rest(rest)
                    break
            elif may_be_option and len(word) > 1 and word.startswith("-"):
                if self._is_theirs(word):
                    self._take(self._arguments[0], word)
                else:
                    self._take_option(word, rest)
            elif self._arguments and self._arguments[0].is_rest:
                self._take_rest([word, *rest])
                break
            else:
                self._take_argument(word)
        if self._missing:
            raise NotUnderstood(f"missing: {', '.join(sorted(self._missing))}")
        return self._raw

    def _take_option(self, word: str, rest: list[str]) -> None:
        name, equals, text = word.partition("=") if word.startswith("--") else (word, "", "")
        param = self.options.get(name)
        if param is None:
            raise NotUnderstood(word)
        if param.shape is Shape.FLAG:
            if equals:
                raise NotUnderstood(word)
            self._raw[param.name] = True
            return
        if not equals:
            if not rest or rest[0].startswith("-"):  # a value that looks like an option: let it be explained
                raise NotUnderstood(word)
            text = rest.pop(0)
        self._take(param, text)

    def _is_theirs(self, word: str) -> bool:
        """Whether an option is for the script that was named before it. One that looks like ours misspelt is refused:
        the script would ignore it, silently."""
        name = word.partition("=")[0]
        mixed = next((param for param in self._arguments if param.is_mixed), None)
        if mixed is None or name in self.options or name in ("-h", "--help"):
            return False
        from sublet.cli.mistakes import option_hint

        script: Sequence[str] = typing.cast(list[str], self._raw[mixed.name])
        hint = option_hint(name, self.options, alike=LIKE_OURS, foreign=not script)
        if script and not hint:
            return True
        where = f"If {name} is for {script[0]}, write it after `--`." if script else "Options of the script follow it."
        raise UsageError(f"`{self._path}` has no option {name}", do=f"{hint} {where}".lstrip())

    def _take_argument(self, word: str) -> None:
        if not self._arguments:
            raise NotUnderstood(word)
        param = self._arguments[0]
        if param.shape is not Shape.MANY:
            self._arguments.pop(0)
        self._take(param, word)

    def _take_rest(self, words: list[str]) -> None:
        param = self._arguments.pop(0)
        if words:
            self._missing.discard(param.name)
        self._raw[param.name] = words

    def _take(self, param: Param, text: str) -> None:
        self._missing.discard(param.name)
        found = self._raw[param.name]
        self._raw[param.name] = [*found, text] if isinstance(found, list) else text
