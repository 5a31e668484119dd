"""The short way in: argparse alone, for a command line that is complete and correct.

It explains nothing. Whatever it cannot take, such as an unknown option, a missing argument or ``--help``, is left to
``full``, which has typer and the time to be helpful. Then a correct command pays for neither.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from sublet.cli.declare import Arg, Command, Opt, Raw, Shape

__all__ = ["NotUnderstood", "option_names", "parse"]


class NotUnderstood(Exception):
    """Leave it to the full way in."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise NotUnderstood(message)


def parse(command: Command, words: Sequence[str]) -> Raw:
    """The raw texts of a command line, or ``NotUnderstood``."""
    rest = next((param for param in command.params if param.is_rest), None)
    if rest is None:
        return vars(_parser(command).parse_args(list(words)))
    at = _where_the_rest_begins(command, words)
    taken = list(words[at:])
    if taken[:1] == ["--"]:
        taken = taken[1:]
    if not taken and rest.required:
        raise NotUnderstood(rest.name)
    return {**vars(_parser(command).parse_args(list(words[:at]))), rest.name: taken}


def option_names(command: Command) -> set[str]:
    """Every option the short way knows, for the test that compares both."""
    return {name for action in _parser(command)._actions for name in action.option_strings}


def _where_the_rest_begins(command: Command, words: Sequence[str]) -> int:
    """Behind our own options and arguments, or at a ``--``. What follows is not ours to understand."""
    options = {flag: param for param in command.params if isinstance(param.spec, Opt) for flag in param.spec.flags}
    arguments = sum(isinstance(param.spec, Arg) and not param.is_rest for param in command.params)
    at = 0
    while at < len(words) and words[at] != "--":
        word = words[at]
        if not word.startswith("-") or word == "-":
            if arguments == 0:
                break
            arguments -= 1
        elif word in options and options[word].shape is not Shape.FLAG:
            at += 1
        at += 1
    return min(at, len(words))


def _parser(command: Command) -> _Parser:
    parser = _Parser(prog=f"sublet {command.path}", add_help=False, allow_abbrev=False)
    for param in command.params:
        spec = param.spec
        if param.is_rest:
            continue
        if isinstance(spec, Opt):
            if param.shape is Shape.FLAG:
                parser.add_argument(*spec.flags, dest=param.name, action="store_true")
            elif param.shape is Shape.MANY:
                parser.add_argument(*spec.flags, dest=param.name, action="append", default=[])
            else:
                parser.add_argument(*spec.flags, dest=param.name, required=param.required)
        elif param.shape is Shape.MANY:
            parser.add_argument(param.name, nargs="+" if param.required else "*")
        else:
            parser.add_argument(param.name, nargs=None if param.required else "?")
    return parser
