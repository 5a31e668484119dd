"""``sublet completion``: prints the shell completion script that typer generates."""

from __future__ import annotations

import os
from typing import Annotated

from sublet.cli.declare import Arg

_SHELLS = ("bash", "zsh", "fish")


def completion(
    *, shell: Annotated[str, Arg("SHELL", choices=_SHELLS, help="Name of the shell: bash, zsh or fish.")]
) -> int:
    """Print the completion script of a shell.

    For bash: eval "$(sublet completion bash)" in ~/.bashrc. For zsh the same in ~/.zshrc, after compinit. For fish:
    sublet completion fish > ~/.config/fish/completions/sublet.fish
    """
    from sublet.cli import full_parser

    os.environ["_SUBLET_COMPLETE"] = f"source_{shell}"
    try:
        return full_parser.run([])
    finally:
        del os.environ["_SUBLET_COMPLETE"]
