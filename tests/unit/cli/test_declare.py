"""A command is declared once, and both ways in agree on what it is."""

from __future__ import annotations

from typing import Annotated

import pytest

from sublet.cli import declare, full_parser
from sublet.cli.declare import Arg, DeclaredCommand, Opt, Shape, UsageError
from sublet.cli.parsing import duration, size
from sublet.cli.table import COMMANDS, GROUPS, SECTIONS, find, load

Values = dict[str, object]


def recording() -> tuple[DeclaredCommand, list[Values]]:
    """A command with one parameter of each shape, and what it was called with."""
    calls: list[Values] = []

    def record(
        *,
        thing: Annotated[str, Arg("THING", help="What.")],
        amount: Annotated[int | None, Opt("--amount", metavar="SIZE", parse=size, help="How much.")] = None,
        ttl: Annotated[float, Opt("--ttl", metavar="DURATION", parse=duration, help="How long.")] = 7.0,
        tier: Annotated[str | None, Opt("--tier", choices=["high", "low"], help="Which.")] = None,
        tag: Annotated[list[str], Opt("--tag", metavar="TAG", help="Any.")] = [],  # noqa: B006
        loud: Annotated[bool, Opt("--loud", "-l", help="Say it.")] = False,
    ) -> int:
        """Do a thing.

        And more about it.
        """
        calls.append({"thing": thing, "amount": amount, "ttl": ttl, "tier": tier, "tag": tag, "loud": loud})
        return 7

    return DeclaredCommand("record", record), calls


def test_a_command_knows_its_parameters_from_the_signature_alone() -> None:
    """Shapes come from the annotations, the summary and the details from the docstring."""
    command, _ = recording()
    assert [(p.name, p.shape, p.required) for p in command.params] == [
        ("thing", Shape.ONE, True),
        ("amount", Shape.ONE, False),
        ("ttl", Shape.ONE, False),
        ("tier", Shape.ONE, False),
        ("tag", Shape.MANY, False),
        ("loud", Shape.FLAG, False),
    ]
    assert command.summary == "Do a thing."
    assert command.details.strip() == "And more about it."


def test_what_was_typed_becomes_values_and_what_was_not_keeps_its_default() -> None:
    command, calls = recording()
    words = ["x", "--amount", "2GiB", "--tag", "a", "--tag", "b", "-l"]
    assert command.run(declare.parse(command, words)) == 7
    assert calls == [{"thing": "x", "amount": 2 << 30, "ttl": 7.0, "tier": None, "tag": ["a", "b"], "loud": True}]


@pytest.mark.parametrize("words", [["x", "--amount", "nan"], ["x", "--ttl", "0"], ["x", "--tier", "medium"]])
def test_nothing_happens_when_one_value_makes_no_sense(words: list[str]) -> None:
    """All of a command line is checked before the function is called, and the message names the option."""
    command, calls = recording()
    with pytest.raises(UsageError) as caught:
        command.run(declare.parse(command, words))
    assert caught.value.message.startswith(words[1])
    assert caught.value.do
    assert calls == []


@pytest.mark.parametrize("words", [[], ["x", "y"], ["x", "--amoun", "1"], ["x", "--amount"], ["x", "--help"]])
def test_the_short_way_leaves_to_the_full_one_what_it_cannot_take(words: list[str]) -> None:
    """Missing and surplus words, abbreviations, missing values, and every question for help."""
    command, _ = recording()
    with pytest.raises(declare.NotUnderstood):
        declare.parse(command, words)


def test_a_parameter_without_a_spec_is_a_mistake_of_ours() -> None:
    def broken(*, thing: str) -> int:
        return len(thing)

    with pytest.raises(TypeError, match="thing"):
        DeclaredCommand("broken", broken)


def test_both_ways_in_know_the_same_options() -> None:
    """Typer's command has the options of the declaration, from which the short way reads them as it goes."""
    whole = full_parser.typer_command()
    for path in COMMANDS:
        command = load(path)
        declared = {flag for param in command.params if isinstance(param.spec, Opt) for flag in param.spec.flags}
        found = whole
        for word in path.split():
            found = found.commands[word]
        typer_options = {flag for param in found.params if param.param_type_name == "option" for flag in param.opts}
        assert typer_options - {"--help", "-h"} == declared, path
        typer_arguments = [param.name for param in found.params if param.param_type_name == "argument"]
        assert typer_arguments == [param.name for param in command.params if isinstance(param.spec, Arg)], path


def test_of_a_command_line_that_names_its_command_no_other_is_loaded() -> None:
    """A mistake in it, or its help, would otherwise wait for all of them."""
    assert set(full_parser.typer_command("run").commands) == {"run"}
    lease = full_parser.typer_command("lease show").commands
    assert set(lease) == {"lease"}
    assert set(lease["lease"].commands) == {"show"}


@pytest.mark.parametrize(
    ("env", "loaded"),
    [
        ({"COMP_WORDS": "sublet lease acq", "COMP_CWORD": "2"}, "lease"),
        ({"COMP_WORDS": "sublet lease ", "COMP_CWORD": "2"}, "lease"),
        ({"COMP_WORDS": "sublet run --ti", "COMP_CWORD": "2"}, "run"),
        ({"COMP_WORDS": "sublet lease", "COMP_CWORD": "1"}, ""),
        ({"COMP_WORDS": "sublet lease acquire", "COMP_CWORD": "1"}, ""),
        ({"COMP_WORDS": "sublet --version le", "COMP_CWORD": "2"}, ""),
        ({"COMP_WORDS": "sublet", "COMP_CWORD": "1"}, ""),
        ({"_TYPER_COMPLETE_ARGS": "sublet lease acq"}, "lease"),
        ({"_TYPER_COMPLETE_ARGS": "sublet lease"}, ""),
        ({"_TYPER_COMPLETE_ARGS": "sublet leese acq"}, ""),
        ({}, ""),
    ],
)
def test_of_a_line_to_complete_only_its_first_word_is_loaded(env: dict[str, str], loaded: str) -> None:
    """While that word itself is being typed it does not count: others may be meant."""
    assert full_parser.first_completed_word(env) == loaded


def test_a_command_that_others_begin_with_is_loaded_with_them() -> None:
    """A second word that is misspelt is told what is like it."""
    groups = [path for path in COMMANDS if path in GROUPS]
    assert groups
    for group in groups:
        own = {path.removeprefix(f"{group} ") for path in COMMANDS if path.startswith(f"{group} ")}
        assert set(full_parser.typer_command(group).commands[group].commands) == own


def test_every_command_has_a_place_in_the_help() -> None:
    """Each first word stands in exactly one section, and each group says what it is for."""
    first_words = {path.split()[0] for path in COMMANDS}
    listed = [word for words in SECTIONS.values() for word in words]
    assert sorted(listed) == sorted(first_words)
    assert set(GROUPS) == {path.split()[0] for path in COMMANDS if " " in path}


@pytest.mark.parametrize(
    ("words", "path", "rest"),
    [
        (["status", "--json"], "status", ["--json"]),
        (["lease", "show", "x"], "lease show", ["x"]),
        (["lease"], None, None),
        (["lease", "nonsense"], None, None),
        ([], None, None),
    ],
)
def test_a_command_is_found_by_its_words(words: list[str], path: str | None, rest: list[str] | None) -> None:
    assert find(words) == (None if path is None else (path, rest))


TRAIN = load("train")


@pytest.mark.parametrize(
    ("line", "ours", "theirs"),
    [
        ("train.py --spot --gpu 8GiB", {"spot": True, "gpu": "8GiB"}, "train.py"),  # the line in the README
        ("--gpu 8GiB --spot train.py", {"spot": True, "gpu": "8GiB"}, "train.py"),
        ("--gpu=8GiB train.py --spot", {"spot": True, "gpu": "8GiB"}, "train.py"),
        ("--gpu 8GiB train.py --lr 0.1 data/ --spot -v", {"spot": True, "gpu": "8GiB"}, "train.py --lr 0.1 data/ -v"),
        ("train.py --offset -1 --gpu 8GiB", {"gpu": "8GiB"}, "train.py --offset -1"),
        ("train.py --gpu 8GiB -- --gpu 3 --spot", {"gpu": "8GiB"}, "train.py --gpu 3 --spot"),
        ("--spot -- train.py --name x -- --spot", {"spot": True}, "train.py --name x -- --spot"),
        ("train.py --env A=1 --env B=2", {"env": ["A=1", "B=2"]}, "train.py"),
        ("-- -m package.train --spot", {}, "-m package.train --spot"),
    ],
)
def test_train_takes_its_options_in_any_order_and_leaves_the_scripts_to_the_script(
    line: str, ours: dict[str, object], theirs: str
) -> None:
    raw = declare.parse(TRAIN, line.split())
    assert {name: value for name, value in raw.items() if value} == {**ours, "command": theirs.split()}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("train.py --spto", "Did you mean --spot? If --spto is for train.py"),
        ("train.py --save-evry 2", "Did you mean --save-every?"),
        ("train.py --teir=spot", "Did you mean --tier?"),
        ("--lr 0.1 train.py", "Options of the script follow it."),
        ("--time 5m train.py", "Did you mean --ttl?"),
    ],
)
def test_no_misspelt_option_of_train_goes_to_the_script(line: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        declare.parse(TRAIN, line.split())
    assert says in caught.value.do


@pytest.mark.parametrize("line", ["train.py --help", "-h", "train.py --gpu", "--gpu --spot train.py", ""])
def test_help_and_incomplete_lines_of_train_are_explained_by_the_full_way(line: str) -> None:
    with pytest.raises(declare.NotUnderstood):
        declare.parse(TRAIN, line.split())
