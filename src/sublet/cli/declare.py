"""Declares commands: a plain function whose keyword arguments carry the options' help.

    def renew(*, lease: Annotated[str, Arg("LEASE", help="The lease's id.")],
              ttl: Annotated[int | None, Opt("--ttl", metavar="DURATION", parse=duration, help="...")] = None) -> int:
        \"\"\"Renew a lease.\"\"\"

From this both ways in are built: ``short`` (argparse; what runs) and ``full`` (typer; what explains). Both hand over
the same raw texts, and only ``DeclaredCommand.run`` turns them into values, so the two cannot disagree on what is
valid.

Nothing here imports ``inspect`` or ``dataclasses``: together they would cost a fifth of the 100 ms that ``sublet
status`` may take.
"""

from __future__ import annotations

import enum
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from sublet.errors import InvalidRequest, SubletError

Raw = Mapping[str, object]
"""What was typed, by parameter name: a text, None, a bool, or a list of texts."""

_REQUIRED: Final = object()


class UsageError(SubletError):
    """The command line cannot be understood; nothing was done. Exit status 2."""


class Arg:
    """A positional argument."""

    __slots__ = ("choices", "help", "is_mixed", "is_rest", "metavar", "parse")

    def __init__(
        self,
        metavar: str,
        *,
        help: str,  # noqa: A002 - the word that argparse and typer use
        parse: Callable[[str], object] | None = None,
        choices: Sequence[str] = (),
        is_rest: bool = False,
        is_mixed: bool = False,
    ) -> None:
        self.is_mixed = is_mixed
        """A script's command line among our options: our options are ours wherever they stand before ``--``; the other
        words are the script's, and so are all behind ``--``."""
        self.is_rest = is_rest
        """It takes this word and all that follow, whatever they look like: the command to run."""
        self.metavar = metavar
        self.help = help
        self.parse = parse
        self.choices = tuple(choices)

    @property
    def label(self) -> str:
        """How messages call it."""
        return self.metavar


class Opt:
    """An option. Without a metavar it is a flag, and its parameter a bool."""

    __slots__ = ("alone", "choices", "flags", "help", "hidden", "metavar", "parse")

    def __init__(
        self,
        *flags: str,
        help: str,  # noqa: A002
        metavar: str = "",
        parse: Callable[[str], object] | None = None,
        choices: Sequence[str] = (),
        hidden: bool = False,
        alone: str | None = None,
    ) -> None:
        self.alone = alone
        """What it means to give it without a value; None: it needs one."""
        self.flags = flags
        self.help = help
        self.metavar = metavar or "|".join(choices)
        self.parse = parse
        self.choices = tuple(choices)
        self.hidden = hidden
        """Left out of the help: for our own processes, not for people."""

    @property
    def label(self) -> str:
        return self.flags[0]


class Shape(enum.Enum):
    """How many texts a parameter takes."""

    FLAG = "flag"
    ONE = "one"
    MANY = "many"


class Param:
    """One parameter of a command, as both parsers need it."""

    __slots__ = ("default", "name", "shape", "spec")

    def __init__(self, name: str, annotation: object, default: object) -> None:
        specs = [m for m in getattr(annotation, "__metadata__", ()) if isinstance(m, Arg | Opt)]
        if len(specs) != 1:
            raise TypeError(f"parameter {name!r} needs exactly one Arg or Opt in its annotation")
        self.name = name
        self.spec: Arg | Opt = specs[0]
        kind = typing.get_args(annotation)[0]
        self.shape = Shape.FLAG if kind is bool else Shape.MANY if typing.get_origin(kind) is list else Shape.ONE
        self.default = default

    @property
    def is_rest(self) -> bool:
        return isinstance(self.spec, Arg) and self.spec.is_rest

    @property
    def is_mixed(self) -> bool:
        return isinstance(self.spec, Arg) and self.spec.is_mixed

    @property
    def required(self) -> bool:
        return self.default is _REQUIRED

    def value(self, raw: object) -> object:
        """The typed value of what was written, or of nothing."""
        match self.shape:
            case Shape.FLAG:
                return bool(raw)
            case Shape.MANY:
                texts = typing.cast(list[str], raw or [])
                return [self._one(text) for text in texts]
            case Shape.ONE:
                return self.default if raw is None else self._one(typing.cast(str, raw))

    def _one(self, text: str) -> object:
        spec = self.spec
        if spec.choices and text not in spec.choices:
            raise UsageError(f"{spec.label}: {text!r} is not known", do=f"Use one of {', '.join(spec.choices)}.")
        if spec.parse is None:
            return text
        try:
            return spec.parse(text)
        except InvalidRequest as error:
            raise UsageError(f"{spec.label}: {error.message}", do=error.do) from error


class DeclaredCommand:
    """A function, read as a command."""

    def __init__(self, path: str, function: Callable[..., int]) -> None:
        self.path = path
        """The words that call it: ``lease acquire``."""
        self.function = function
        hints: dict[str, Any] = typing.get_type_hints(function, include_extras=True)
        defaults: dict[str, object] = function.__kwdefaults__ or {}
        self.params = [
            Param(name, hint, defaults.get(name, _REQUIRED)) for name, hint in hints.items() if name != "return"
        ]
        summary, _, rest = (function.__doc__ or "").partition("\n\n")
        self.summary = summary.strip()
        self.details = "\n".join(line.removeprefix("    ") for line in rest.rstrip().splitlines())

    def spelt_out(self, words: Sequence[str]) -> list[str]:
        """The same words, with a value for each option that was given alone and may be."""
        alone = {
            flag: spec.alone
            for spec in (param.spec for param in self.params)
            if isinstance(spec, Opt)
            for flag in spec.flags
            if spec.alone is not None
        }
        if not alone:
            return list(words)
        found: list[str] = []
        for place, word in enumerate(words):
            after = words[place + 1] if place + 1 < len(words) else "-"
            found.append(f"{word}={alone[word]}" if word in alone and after.startswith("-") else word)
        return found

    def run(self, raw: Raw) -> int:
        """Check what was typed, all of it before anything happens, and do it. Returns the exit status."""
        values = {param.name: param.value(raw.get(param.name)) for param in self.params}
        return self.function(**values)


# ---------------------------------------------------------------------------------------------------------------- short
#
# The fast parser, for a command line that is complete and correct.
#
# It explains nothing. Whatever it cannot take, such as an unknown option, a missing argument or ``--help``, is left to
# ``full``, which has typer and the time to be helpful. Then a correct command pays for neither. Why not ``argparse``:
# it takes 7 ms to load, a fifth of what lies between the prompt and the first line of `sublet run`'s command.


LIKE_OURS: Final = 0.82
"""``--spto`` is so like ``--spot``; ``--epochs`` is not like any of ours."""


class NotUnderstood(Exception):
    """Leave it to the full way in."""


def parse(command: DeclaredCommand, words: Sequence[str]) -> Raw:
    """The raw texts of a command line, or ``NotUnderstood``."""
    return _Reading(command).read(words)


class _Reading:
    """One walk over the words of one command."""

    def __init__(self, command: DeclaredCommand) -> None:
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
                elif self._is_negative_number(word):
                    self._take_argument(word)
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

    def _is_negative_number(self, word: str) -> bool:
        """Whether it is one where an argument may stand: what reads the argument says better what is wrong with it."""
        may_be = word[1].isdigit() and word not in self.options
        return may_be and bool(self._arguments) and not self._arguments[0].is_rest

    def _is_theirs(self, word: str) -> bool:
        """Whether an option is for the script that was named before it. One that looks like ours misspelt is refused:
        the script would ignore it, silently."""
        name = word.partition("=")[0]
        mixed = next((param for param in self._arguments if param.is_mixed), None)
        if mixed is None or name in self.options or name in ("-h", "--help"):
            return False
        from sublet.cli.hints import option_hint

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
