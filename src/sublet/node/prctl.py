"""Calls ``prctl``: become a subreaper, die with the parent, drop the right to gain privileges.

Python has no call for it, so this goes through ctypes, which costs a third of a megabyte; it is loaded at the first
call and not before, so that a program that merely imports this module pays nothing.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_PR_SET_NO_NEW_PRIVS: Final = 38


class ParentGone(OSError):
    """The parent ended before this process could be tied to it."""


def set_child_subreaper() -> None:
    """From now on whatever loses its parent below this process becomes its child. Not inherited by a fork."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_pdeathsig(number: signal.Signals, parent: int) -> None:
    """This process is sent the signal when ``parent`` ends; if it already has, ``ParentGone``.

    The kernel forgets the wish at a change of user or of rights and at the exec of a set-uid file, and it is not
    inherited, so it is asked for last. It is about the *thread* that made this process: a supervisor has one.
    """
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it may have ended before the wish was made, and then nothing would ever be sent
        raise ParentGone(f"process {parent}, which started this one, has ended")


def set_no_new_privs() -> None:
    """No exec gives this process, or one below it, more rights than it has."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def _prctl(option: int, argument: int) -> None:
    import ctypes

    if _function()(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), f"prctl {option}")


@functools.cache
def _function() -> Callable[..., int]:
    import ctypes

    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = [ctypes.c_int, *([ctypes.c_ulong] * 4)]
    prctl.restype = ctypes.c_int
    found: Callable[..., int] = prctl
    return found
