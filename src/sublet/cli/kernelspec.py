"""``sublet kernelspec``: kernels whose cells run on a leased device, in the menu of Jupyter."""

from __future__ import annotations

from typing import Annotated

from sublet.cli.declare import Opt
from sublet.cli.exits import DONE
from sublet.values import Tier

__all__ = ["install", "uninstall"]

Name = Annotated[
    str | None,
    Opt("--name", metavar="NAME", help="What Jupyter calls it; `sublet` if left out."),
]
User = Annotated[bool, Opt("--user", help="For you alone, in whatever environment Jupyter runs.")]
Prefix = Annotated[
    str | None, Opt("--prefix", metavar="FOLDER", help="Below this folder, such as that of another environment.")
]

DEFAULT = "sublet"


def install(
    *,
    vram: Annotated[
        str | None,
        Opt("--vram", "--gpu", metavar="SIZE", help="Memory of the device; 1GiB if left out."),
    ] = None,
    gpus: Annotated[str | None, Opt("--gpus", metavar="N", help="So many devices, all or none.")] = None,
    ttl: Annotated[str | None, Opt("--ttl", metavar="DURATION", help="How long it is lent at a time.")] = None,
    tier: Annotated[
        str | None, Opt("--tier", choices=[t.value for t in Tier], help="Who goes first; interactive if left out.")
    ] = None,
    waiting: Annotated[str | None, Opt("--wait", metavar="DURATION", help="The longest to wait in line.")] = None,
    name: Name = None,
    user: User = False,
    prefix: Prefix = None,
) -> int:
    """Add a kernel to Jupyter whose every cell runs on a leased device.

    A notebook with this kernel needs no `%%gpu`; a cell that begins with `%%cpu` stays where the notebook is. Nothing
    is leased until a cell runs. It is put where this Python's environment has its kernels, or where --user or --prefix
    say; one of ours that is there already is replaced.
    """
    from sublet.notebook import kernelspec

    asked = (("--vram", vram), ("--gpus", gpus), ("--ttl", ttl), ("--tier", tier), ("--wait", waiting))
    words = [word for flag, value in asked if value is not None for word in (flag, value)]
    called = name or DEFAULT
    folder = kernelspec.install(called, words, user=user, prefix=prefix)
    print(f"The kernel is there: “{kernelspec.kernel_json(words)['display_name']}”, in {folder}.")
    print("  Choose it in Jupyter's menu of kernels; reload the page if it is open.")
    return DONE


def uninstall(*, name: Name = None, user: User = False, prefix: Prefix = None) -> int:
    """Take such a kernel out of Jupyter again."""
    from sublet.notebook import kernelspec

    folder = kernelspec.uninstall(name or DEFAULT, user=user, prefix=prefix)
    print(f"The kernel is gone from {folder.parent}.")
    return DONE
