"""``sublet kernelspec``: Jupyter kernels whose cells run on a leased device."""

from __future__ import annotations

from typing import Annotated

from sublet.cli.declare import Opt
from sublet.cli.exit_status import DONE
from sublet.values import Tier

Name = Annotated[str | None, Opt("--name", metavar="NAME", help="Name of the kernelspec (default: sublet).")]
User = Annotated[bool, Opt("--user", help="Install for the current user, for every environment.")]
Prefix = Annotated[
    str | None, Opt("--prefix", metavar="FOLDER", help="Install below this folder, such as another environment.")
]

DEFAULT = "sublet"


def install(
    *,
    vram: Annotated[str | None, Opt("--vram", "--gpu", metavar="SIZE", help="GPU memory (default: 1GiB).")] = None,
    gpus: Annotated[
        str | None, Opt("--gpus", metavar="N", help="Number of GPUs, all on one machine (default: 1).")
    ] = None,
    ttl: Annotated[str | None, Opt("--ttl", metavar="DURATION", help="Time to live of a lease (default: 5m).")] = None,
    tier: Annotated[
        str | None, Opt("--tier", choices=[t.value for t in Tier], help="Scheduling tier (default: interactive).")
    ] = None,
    shared: Annotated[
        bool, Opt("--shared", help="Share the GPU with your other leases, each within its --vram.")
    ] = False,
    waiting: Annotated[
        str | None, Opt("--wait", metavar="DURATION", help="Longest wait in the queue (default: no limit).")
    ] = None,
    name: Name = None,
    user: User = False,
    prefix: Prefix = None,
) -> int:
    """Add a kernel to Jupyter that runs every cell on a leased device.

    A notebook with this kernel needs no `%%gpu`; a cell that begins with `%%cpu` runs where the notebook is. Nothing is
    leased until a cell runs. Options that are left out are taken from `sublet config`. The kernelspec is installed in
    this Python's environment unless --user or --prefix is given; an earlier one of Sublet's is replaced.
    """
    from sublet.notebook import kernel_mode

    given = (("--vram", vram), ("--gpus", gpus), ("--ttl", ttl), ("--tier", tier), ("--wait", waiting))
    words = [word for flag, value in given if value is not None for word in (flag, value)] + ["--shared"] * shared
    called = name or DEFAULT
    folder = kernel_mode.install(called, words, user=user, prefix=prefix)
    print(f"The kernel is there: “{kernel_mode.kernel_json(words)['display_name']}”, in {folder}.")
    print("  Choose it in Jupyter's menu of kernels; reload the page if it is open.")
    return DONE


def uninstall(*, name: Name = None, user: User = False, prefix: Prefix = None) -> int:
    """Remove such a kernel from Jupyter."""
    from sublet.notebook import kernel_mode

    folder = kernel_mode.uninstall(name or DEFAULT, user=user, prefix=prefix)
    print(f"The kernel is gone from {folder.parent}.")
    return DONE
