"""The table of commands, one line each; a command's module is imported when it is called."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Final

from sublet.cli.declare import DeclaredCommand

COMMANDS: Final[dict[str, str]] = {
    "demo": "demo:demo",
    "up": "office:up",
    "down": "office:down",
    "status": "status:status",
    "top": "top:top",
    "doctor": "doctor:doctor",
    "run": "run:run",
    "train": "train:train",
    "burst": "burst:burst",
    "ps": "guests:ps",
    "logs": "guests:logs",
    "exec": "exec:exec_",
    "stop": "guests:stop",
    "nb run": "nb:run",
    "nb submit": "nb:submit",
    "nb status": "nb:status",
    "nb fetch": "nb:fetch",
    "nb open": "nb:open_",
    "nb stop": "nb:stop",
    "nb resume": "nb:resume",
    "lab": "lab:lab",
    "kernelspec install": "kernelspec:install",
    "kernelspec uninstall": "kernelspec:uninstall",
    "lease ls": "lease:ls",
    "lease show": "lease:show",
    "lease explain": "lease:explain",
    "lease acquire": "acquire:acquire",
    "lease renew": "lease:renew",
    "lease release": "lease:release",
    "lease revoke": "lease:revoke",
    "session start": "session:start",
    "session ls": "session:ls",
    "session show": "session:show",
    "session rest": "session:rest",
    "session resume": "session:resume",
    "session accept": "session:accept",
    "session decline": "session:decline",
    "session end": "session:end",
    "session explain": "session:explain",
    "session bill": "session:bill",
    "studio": "studio:studio",
    "studio serve": "serve:serve",
    "person add": "person:add",
    "person set": "person:change",
    "person enrol": "person:enrol",
    "person invite": "person:invite",
    "person token": "person:token",
    "person revoke": "person:revoke",
    "person rm": "person:rm",
    "person show": "person:show",
    "person ls": "person:ls",
    "volume ls": "volume:ls",
    "volume show": "volume:show",
    "volume verify": "volume:verify",
    "volume cp": "volume:cp",
    "volume rm": "volume:rm",
    "bill": "bill:bill",
    "tenant add": "tenant:add",
    "tenant set": "tenant:change",
    "tenant disable": "tenant:disable",
    "tenant enable": "tenant:enable",
    "tenant rm": "tenant:rm",
    "tenant ls": "tenant:ls",
    "group add": "group:add",
    "group set": "group:change",
    "group rm": "group:rm",
    "group ls": "group:ls",
    "reservation add": "reservation:add",
    "reservation rm": "reservation:rm",
    "reservation ls": "reservation:ls",
    "budget set": "budget:change",
    "budget credit": "budget:credit",
    "budget rm": "budget:rm",
    "budget ls": "budget:ls",
    "simulate": "simulate:simulate",
    "policy show": "policy:show",
    "policy check": "policy:check",
    "policy apply": "policy:apply",
    "fence ls": "operator:fence_ls",
    "fence clear": "operator:fence_clear",
    "drain": "operator:drain",
    "audit log": "operator:audit_log",
    "audit verify": "operator:audit_verify",
    "backup": "operator:backup",
    "restore": "operator:restore",
    "config": "config:config",
    "purge": "purge:purge",
    "completion": "completion:completion",
}
"""The words of a command → module and function in this package, in the order the help shows them."""

GROUPS: Final[dict[str, str]] = {
    "nb": "Run whole notebooks, now or in the background.",
    "lease": "Acquire, list, renew and release leases.",
    "session": "Start, rest, resume and end sessions: GPU work that outlives its leases.",
    "studio": "Serve sessions to people, and programs to those who ask them.",
    "person": "Manage the people of the studio, their tokens and invites.",
    "kernelspec": "Install Jupyter kernels whose cells run on a leased device.",
    "volume": "List, verify, copy and remove named volumes.",
    "tenant": "Manage tenants, their tokens and limits.",
    "group": "Manage groups of tenants: weights, floors, ceilings and limits.",
    "reservation": "Manage reservations: GPUs for a group at stated times.",
    "budget": "Manage budgets: what tenants and groups may spend in a window.",
    "policy": "Show, check and apply the operator's limits.",
    "fence": "List or clear quarantined devices.",
    "audit": "Read and verify the audit log.",
}

SECTIONS: Final[dict[str, tuple[str, ...]]] = {
    "Start here": ("demo", "doctor"),
    "The office": ("up", "down", "status", "top"),
    "Commands under a lease": ("run", "train", "burst", "ps", "logs", "exec", "stop"),
    "Notebooks": ("nb", "lab", "session", "kernelspec"),
    "Leases": ("lease", "volume", "bill"),
    "For the operator": (
        "studio",
        "person",
        "tenant",
        "group",
        "reservation",
        "budget",
        "policy",
        "simulate",
        "fence",
        "drain",
        "audit",
        "backup",
        "restore",
    ),
    "This installation": ("config", "purge", "completion"),
}
"""How the help groups the words that can come first."""


def find(words: Sequence[str]) -> tuple[str, Sequence[str]] | None:
    """The command these words begin with, and the rest of them."""
    for length in (2, 1):
        path = " ".join(words[:length])
        if len(words) >= length and path in COMMANDS:
            return path, words[length:]
    return None


def load(path: str) -> DeclaredCommand:
    """Import the one module that has this command."""
    module_name, _, function = COMMANDS[path].partition(":")
    module = importlib.import_module(f"sublet.cli.{module_name}")
    return DeclaredCommand(path, getattr(module, function))
