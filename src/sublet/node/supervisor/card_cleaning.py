"""Cleans a card between two leases: no process on it, memory at baseline, settings restored, memory overwritten.

The driver is asked, and the card overwritten, by a short-lived program of its own (``sublet.node.agent.clean_card``): a
driver may block its caller, and a process that has once used CUDA keeps a piece of the card. This module only starts
that program and reads its answer. A card that was not seen to be clean is not free.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from sublet.errors import SubletError
from sublet.lease.hardware import Clean, NotYet, Unclean, Verdict
from sublet.node.errands import ANSWER_FD, ANSWERED, Errands
from sublet.node.loop import log_trouble
from sublet.values import Epoch, LeaseId
from sublet.wire.cards import CardFound
from sublet.wire.codec import loads
from sublet.wire.zygote import python_argv

AGAIN_NS: Final = 200_000_000
"""Between two looks while the program runs, or a card comes to rest."""
PROGRAM: Final = "sublet.node.agent.clean_card"

Run = Callable[[Sequence[str]], str]
"""What an errand does to have the program run: its answer is what that writes."""


@dataclass(slots=True)
class _Look:
    """One look at one card, for one lease."""

    is_done: bool = False
    found: CardFound | None = None
    """None once it is done: it failed, and it is not known why."""


@dataclass(slots=True)
class _Card:
    settings: str = ""
    """Those it had when it was lent; empty where guests cannot change them."""
    since_ns: int | None = None
    """Since when it is lent without having been seen clean."""
    looks: dict[tuple[LeaseId, Epoch], _Look] = field(default_factory=dict)


class CardCleaning:
    """All cards of this machine."""

    def __init__(
        self, errands: Errands, run: Run | None = None, *, is_root: bool | None = None, begun_ns: int | None = None
    ) -> None:
        """``is_root``: whether guests may change the settings of a card. Where they may not, whatever changes them is
        an operator, or the card itself. ``begun_ns``: when this supervisor began; no guest had a card before, but for
        what ``was_lent``."""
        self._errands = errands
        self._run = run or run_program
        self._is_root = os.geteuid() == 0 if is_root is None else is_root
        self._begun_ns = begun_ns
        self.lends_beside = False
        """Whether programs of others that were on a card when it was lent may stay there."""
        self._cards: dict[str, _Card] = {}

    def lent(self, card: str, now_ns: int) -> None:
        """It is about to be used: what it is set to now is what it is set to again afterwards, and what draws with it
        now may go on."""
        known = self._cards.setdefault(card, _Card())
        if known.since_ns is not None:
            return
        known.since_ns, known.settings = now_ns, ""
        if not self._is_root:
            return

        def told(said: str | None) -> None:
            found = _found_in(said)
            known.settings = found.settings if found is not None else ""

        self._errands.run(lambda: self._run((card, "--look")), told)

    def was_lent(self, card: str, since_ns: int) -> None:
        """An earlier supervisor had guests on it since then, or since before."""
        self._cards.setdefault(card, _Card(since_ns=since_ns))

    def look(self, card: str, lease: LeaseId, epoch: Epoch, *, neighbours: bool, now_ns: int) -> Verdict:
        """How far it has come. With neighbours on the card nothing can be said of its memory as a whole, and nothing
        is overwritten: who shares a card has let each other near."""
        if neighbours:
            return Clean()
        known = self._cards.setdefault(card, _Card(since_ns=self._begun_ns))
        look = known.looks.get((lease, epoch))
        if look is None:
            look = known.looks[lease, epoch] = self._begin(card, known)
        if not look.is_done:
            return NotYet(what=f"{card} is still being cleaned", again_ns=now_ns + AGAIN_NS, is_working=True)
        del known.looks[lease, epoch]
        verdict = _verdict(card, look.found, now_ns)
        if isinstance(verdict, Clean):
            known.since_ns = None
            if look.found is not None and look.found.note:
                log_trouble(f"{card}: {look.found.note}", None)
        return verdict

    def _begin(self, card: str, known: _Card) -> _Look:
        look = _Look()

        def told(said: str | None) -> None:
            look.is_done, look.found = True, _found_in(said)

        settings = ("--settings", known.settings) if known.settings else ()
        since = ("--since", str(known.since_ns)) if known.since_ns is not None else ()
        beside = ("--beside", "1") if self.lends_beside else ()
        self._errands.run(lambda: self._run((card, "--scrub", *settings, *since, *beside)), told)
        return look


def _verdict(card: str, found: CardFound | None, now_ns: int) -> Verdict:
    if found is None:
        return NotYet(what=f"{card} could not be looked at: the program for it failed", again_ns=now_ns + AGAIN_NS)
    if found.failed:
        return Unclean(detail=f"{card}: {found.failed}", hard=found.is_hard)
    if found.left:
        return NotYet(what=f"{card}: {found.left}", again_ns=now_ns + AGAIN_NS)
    return Clean(scrub_ns=found.scrub_ns)


def _found_in(said: str | None) -> CardFound | None:
    try:
        return loads(CardFound, (said or "").encode())
    except SubletError:
        return None


def run_program(arguments: Sequence[str]) -> str:
    """Become that program, in a fresh interpreter. In an errand, whose answer is then what the program writes: so it is
    still the errand that is known, and ended when it takes too long."""
    argv = python_argv(sys.executable, PROGRAM, *arguments)
    os.dup2(ANSWER_FD, 1)
    os.write(1, ANSWERED)
    os.execv(argv[0], argv)
