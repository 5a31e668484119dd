"""The full parser: typer, for help, completion and errors in a command line.

The app is made from the same declarations as the short way. Its parameters are all texts; what they mean is checked
in ``DeclaredCommand.run``, for both.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from sublet import __version__
from sublet.cli.declare import DeclaredCommand, Opt, Param, Shape, UsageError
from sublet.cli.hints import command_hint, option_hint
from sublet.cli.table import COMMANDS, GROUPS, SECTIONS, find, load
from sublet.invocation import typeable

_ABOUT = """GPUs cannot be shared, so we lend them for minutes at a time.

Acquire a lease, use the hardware, release it. A lease has a time to live; when it ends, its processes are ended, and
that is verified before the hardware is leased again. A machine without a GPU leases host devices (CPU) instead.

New here? `sublet demo` shows it all in under a minute, in a temporary folder. Then: `sublet lease acquire --gpu 1GiB`.
"""
_EPILOG = (
    "Environment: SUBLET_HOME (state folder), SUBLET_URL and SUBLET_TOKEN (an office elsewhere). "
    "Exit status: 0 done, 1 failure, 2 usage, 75 refused or not granted in time, 76 the lease ended, "
    "78 a copied state folder."
)


def run(words: Sequence[str]) -> int:
    """Understand a command line, or say what is wrong with it."""
    named = ""
    if "_SUBLET_COMPLETE" in os.environ:
        named = first_completed_word(os.environ)
    elif (known := find(words)) is not None:
        named, rest = known
        words = [*named.split(), *load(named).spelt_out(rest)]
    try:
        status = typer_command(named).main(args=list(words), prog_name="sublet", standalone_mode=False)
    except typer.TyperException as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # the message is the help, and was asked for by saying nothing
            print(error.format_message())
            return error.exit_code
        raise _usage_error(error, words) from error
    except typer.Abort as error:
        raise KeyboardInterrupt from error
    except SystemExit as done:  # how completion ends
        return int(done.code or 0)
    return int(status or 0)


def first_completed_word(env: Mapping[str, str]) -> str:
    """The first word of a line to complete, if it is a command's or group's and the cursor stands behind it.

    Empty otherwise: then all commands are loaded, which a person who presses the tab key feels."""
    line = env.get("_TYPER_COMPLETE_ARGS") or env.get("COMP_WORDS", "")  # up to the cursor; bash says the whole line
    if env.get("COMP_CWORD") == "1":
        return ""
    found = re.match(r"\s*\S+\s+(\S+)\s", line)
    return found[1] if found and any(path.split()[0] == found[1] for path in COMMANDS) else ""


def _usage_error(error: typer.TyperException, words: Sequence[str]) -> UsageError:
    """Typer's message in our form, with what may be meant where other tools call it so."""
    message, see = error.format_message().rstrip("."), f"See `{_help_for(words)}`."
    option = getattr(error, "option_name", None)
    if type(error).__name__ == "NoSuchOption" and option is not None and (found := find(words)) is not None:
        flags = [flag for param in load(found[0]).params if isinstance(param.spec, Opt) for flag in param.spec.flags]
        typed = next((word for word in words if word.startswith(option)), option)
        hint = option_hint(typed.partition("=")[0], flags) or option_hint(option, flags)
        if hint:
            return UsageError(f"`{found[0]}` has no option {typed.partition('=')[0]}", do=f"{hint} {see}")
    if message.startswith("No such command") and (hint := command_hint(words, COMMANDS, GROUPS)):
        return UsageError(f"no such command '{' '.join(words[: 2 if words[0] in GROUPS else 1])}'", do=hint)
    return UsageError(message[:1].lower() + message[1:], do=see)


class _Command(TyperCommand):
    def get_help_option(self, ctx: Any) -> Any:
        return _untyped(super().get_help_option(ctx))


class _Group(TyperGroup):
    def get_help_option(self, ctx: Any) -> Any:
        return _untyped(super().get_help_option(ctx))


def _untyped(option: Any) -> Any:
    """``--help`` takes no value, so it is not shown as ``--help <bool>``."""
    if option is not None:
        option.metavar = ""
    return option


@cache
def typer_command(named: str = "") -> Any:
    """The command line as typer has it, made once in a process: the whole, or as much of it as a named command and
    those that begin with its name. To load all commands takes half a second."""
    app = get_command(_make_app([path for path in COMMANDS if f"{path} ".startswith(f"{named} ".lstrip())]))
    # Completion is on, and `sublet completion` prints the script; typer's own two options would only crowd the help.
    app.params = [param for param in app.params if param.name not in ("install_completion", "show_completion")]
    return app


def _make_app(paths: Sequence[str]) -> typer.Typer:
    """The typer app with these commands."""
    settings: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
    app = typer.Typer(
        name="sublet",
        cls=_Group,
        help=_flowing(_ABOUT),
        epilog=_EPILOG,
        no_args_is_help=True,
        context_settings=settings,
        rich_markup_mode="rich",
    )
    app.callback()(_root)
    panels = {word: section for section, words in SECTIONS.items() for word in words}
    groups: dict[str, typer.Typer] = {}
    for path in paths:
        command = load(path)
        group, _, word = path.rpartition(" ")
        parent = app
        text = _flowing(f"{command.summary}\n\n{command.details}")
        if path in GROUPS:  # a command that other commands begin with
            groups[path] = typer.Typer(cls=_Group, help=text, invoke_without_command=True, context_settings=settings)
            groups[path].callback()(_alone(command))
            app.add_typer(groups[path], name=path, rich_help_panel=panels[path])
            continue
        if group:
            if group not in groups:
                groups[group] = typer.Typer(
                    cls=_Group, help=GROUPS[group], no_args_is_help=True, context_settings=settings
                )
                app.add_typer(groups[group], name=group, rich_help_panel=panels[group])
            parent = groups[group]
        parent.command(
            word,
            cls=_Command,
            help=text,
            rich_help_panel=panels.get(path),
            context_settings=_settings_of(command, settings),
        )(_callback(command))
    return app


def _root(
    version: Annotated[
        bool, typer.Option("--version", metavar="", help="Print the version and stop.", is_eager=True)
    ] = False,
    as_tenant: Annotated[  # taken off the words before they come here; this is for the help
        bool,
        typer.Option(
            "--as-tenant",
            metavar="",
            help="Before the command, for root or the office's owner: act as the tenant of SUBLET_TOKEN.",
        ),
    ] = False,
) -> None:
    if version:
        print(f"sublet {__version__}")
        raise typer.Exit


def _settings_of(command: DeclaredCommand, settings: dict[str, Any]) -> dict[str, Any]:
    """Behind the first word of the command to run nothing is an option of ours, unless it is mixed with
    ours: then what is no option of ours is theirs."""
    if any(param.is_mixed for param in command.params):
        return {**settings, "ignore_unknown_options": True}
    if any(param.is_rest for param in command.params):
        return {**settings, "allow_interspersed_args": False}
    return settings


def _callback(command: DeclaredCommand) -> Callable[..., int]:
    """A function with the signature that typer reads, which hands the raw texts to the command."""

    def call(**raw: Any) -> int:
        return command.run(raw)

    parameters = [_parameter(param) for param in command.params]
    # Typer reads the signature and the annotations, so both are given.
    call.__signature__ = inspect.Signature(parameters, return_annotation=int)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def _alone(command: DeclaredCommand) -> Callable[..., int]:
    """The same for a command that is a group as well: it runs where no command of the group was said."""
    run = _callback(command)

    def call(context: typer.Context, **raw: Any) -> int:
        return run(**raw) if context.invoked_subcommand is None else 0

    parameter = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    own = inspect.signature(run)
    call.__signature__ = own.replace(parameters=[parameter, *own.parameters.values()])  # type: ignore[attr-defined]
    call.__annotations__ = {**run.__annotations__, "context": typer.Context}
    return call


def _parameter(param: Param) -> inspect.Parameter:
    spec = param.spec
    kind: Any = {Shape.FLAG: bool, Shape.ONE: str if param.required else str | None, Shape.MANY: list[str]}[param.shape]
    default: Any = inspect.Parameter.empty
    if not param.required:
        default = {Shape.FLAG: False, Shape.ONE: None, Shape.MANY: []}[param.shape]
    extra: dict[str, Any] = {"help": typeable(spec.help)}
    if spec.choices:
        extra["autocompletion"] = lambda incomplete: [c for c in spec.choices if c.startswith(incomplete)]
    extra["metavar"] = spec.metavar
    if isinstance(spec, Opt):
        info = typer.Option(*spec.flags, hidden=spec.hidden, show_default=False, **extra)
    else:
        info = typer.Argument(show_default=False, **extra)
    annotation = Annotated[kind, info]
    return inspect.Parameter(param.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _flowing(text: str) -> str:
    """Paragraphs without line ends of their own: the terminal's width breaks them, not ours."""
    return typeable("\n\n".join(" ".join(paragraph.split()) for paragraph in text.strip().split("\n\n")))


def _help_for(words: Sequence[str]) -> str:
    """The most specific help there is for what was typed."""
    path = ""
    for word in words:
        longer = f"{path} {word}".strip()
        if not any(known == longer or known.startswith(f"{longer} ") for known in COMMANDS):
            break
        path = longer
    return f"sublet {path} --help".replace("  ", " ")
