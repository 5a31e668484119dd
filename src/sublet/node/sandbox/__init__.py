"""Isolates a tenant's guest from all other processes and users of the machine.

probe.py        what this machine and these rights allow, each part tried for real
abilities.py    the answer, and how ``sublet doctor`` says it
plan.py         which steps, in which order; what must hold and cannot is a refusal (pure)
enter.py        the steps, done between fork and exec
carried.py      the plan as text, for a warm interpreter whose copies take these steps themselves
root.py         the file system a guest sees
landlock.py     what of it the guest may touch, a second time, by another mechanism
system_calls.py which system calls it may make, and which kinds of socket
init.py         the two processes that stand over a process namespace
syscalls.py     the calls Python lacks
uids.py         one user number for one tenant, for good
environment.py  what a tenant's guest finds in its environment
cleaning.py     removing what a guest left, which may be hostile
"""

from sublet.node.sandbox.abilities import Abilities, PartFinding, SandboxPart
from sublet.node.sandbox.cleaning import Left, remove_tree
from sublet.node.sandbox.enter import EnterFailed, enter
from sublet.node.sandbox.plan import (
    Ids,
    SandboxPlan,
    SandboxPolicy,
    SandboxProfile,
    SandboxRefusal,
    Wish,
    clean_env,
    plan,
)
from sublet.node.sandbox.uids import Blocks, Uids

__all__ = [
    "Abilities",
    "Blocks",
    "EnterFailed",
    "Ids",
    "Left",
    "PartFinding",
    "SandboxPart",
    "SandboxPlan",
    "SandboxPolicy",
    "SandboxProfile",
    "SandboxRefusal",
    "Uids",
    "Wish",
    "clean_env",
    "enter",
    "plan",
    "remove_tree",
]
