"""Runs a story about one holder: a text file of commands and of what must come of each.

A command stands on a line that begins with ``>`` and a moment; what came of it follows, up to the next blank line or
command: what the command answered, what the holder said, and where it is now. Lines that begin with ``#`` tell the
story. Run the tests with ``SUBLET_REWRITE=1`` to write what really came of it, then read the difference.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from sublet.lease.holder import HELD_STATES, Holder
from sublet.lease.policy import RenewalPolicy
from sublet.lease.value import (
    Attempt,
    Outcome,
    RenewalGranted,
    RenewalRefused,
    RenewalUnknown,
)
from sublet.lease_end import EndReason, LeaseEnd
from sublet.values import (
    Epoch,
    LeaseId,
    RenewMode,
    format_duration,
    parse_duration_ns,
)

Words = dict[str, str]


def replayed(text: str) -> str:
    """The story with what really came of each command."""
    teller = Teller()
    lines: list[str] = []
    skipping = False
    for line in text.splitlines():
        if line.startswith("> "):
            lines += [line, *teller.do(line[2:])]
            skipping = True
        elif not line or line.startswith("#"):
            lines.append(line)
            skipping = False
        elif not skipping:
            raise ValueError(f"a line of a story is a command, a comment, or what came of a command: {line!r}")
    return "\n".join(lines) + "\n"


@dataclass
class Teller:
    """Carries the commands of one story out."""

    now_ns: int = 0
    holder: Holder | None = None
    attempts: dict[str, Attempt] = field(default_factory=dict)

    def do(self, command: str) -> Iterator[str]:
        moment, verb, *rest = shlex.split(command)
        self.now_ns = _time(moment)
        words = dict(word.split("=", 1) for word in rest if "=" in word)
        plain = [word for word in rest if "=" not in word]
        tell: Callable[[list[str], Words], str | None] = getattr(self, f"do_{verb.replace('-', '_')}")
        answer = tell(plain, words)
        if answer is not None:
            yield f"  {answer}"
        if self.holder is None:
            return
        for news in self.holder.take_news():
            yield f"  says {news.word}: {news.detail}" if news.detail else f"  says {news.word}"
        yield f"  {self.place()}"

    def place(self) -> str:
        """Where the holder is, in one line."""
        holder = self.told()
        if holder.end is not None:
            detail = f", {holder.end.detail}" if holder.end.detail else ""
            return f"{holder.status}: {holder.end.reason} at {holder.end.at}{detail}"
        if holder.status not in HELD_STATES:
            if holder.claim_by_ns is None:
                return holder.status
            left_ns = max(0, holder.claim_by_ns - self.now_ns)
            return f"{holder.status}: claim within {format_duration(left_ns)}"
        assert holder.deadline_ns is not None
        taken = "" if holder.take_at_ns is None else f", to be taken at {_said(holder.take_at_ns)}"
        wake_ns = holder.next_wake_ns()
        assert wake_ns is not None
        return f"{holder.status} until {_said(holder.deadline_ns)}{taken}, next {_said(wake_ns)}"

    def told(self) -> Holder:
        assert self.holder is not None, "a story begins with: > 0s new ttl=5m"
        return self.holder

    # ---- the commands

    def do_new(self, plain: list[str], words: Words) -> None:
        self.holder = Holder(
            LeaseId("L-1"),
            ttl_ns=_time(words["ttl"]),
            policy=RenewalPolicy(
                mode=RenewMode(words.get("mode", "while-busy")),
                jitter_fraction=0.0,
                every=words.get("every"),
                max_hold=words.get("max_hold"),
            ),
            lead_ns=_time(words.get("lead", "0s")),
            stamp=_said,
        )

    def do_ready(self, plain: list[str], words: Words) -> None:
        self.told().ready(self.now_ns, Epoch.parse(words["epoch"]), _time(words["claim"]))

    def do_back(self, plain: list[str], words: Words) -> None:
        self.told().back_in_line()

    def do_held(self, plain: list[str], words: Words) -> str | None:
        done = self.told().held(
            self.now_ns,
            sent_ns=_time(words["sent"]),
            granted_ns=_time(words["granted"]),
            epoch=Epoch.parse(words["epoch"]),
        )
        return None if done else "changes nothing"

    def do_send(self, plain: list[str], words: Words) -> str:
        """An attempt, due or not."""
        active = {"yes": True, "no": False}.get(words.get("active", ""))
        attempt = self.attempts[plain[0]] = self.told().attempt(self.now_ns, active=active)
        asks = "" if attempt.ttl_ns is None else f", asks for {format_duration(attempt.ttl_ns)}"
        busy = "busy" if attempt.active else "not busy"
        return (
            f"sent, answer within {format_duration(attempt.timeout_ns)}, {busy}, "
            f"{format_duration(attempt.busy_ns)} of work to report{asks}"
        )

    def do_tick(self, plain: list[str], words: Words) -> str | None:
        self.told().tick(self.now_ns)
        return "renewal is due" if self.told().attempt_due(self.now_ns) else None

    def do_granted(self, plain: list[str], words: Words) -> str | None:
        return self.outcome(plain[0], RenewalGranted(granted_ns=_time(plain[1])))

    def do_unanswered(self, plain: list[str], words: Words) -> str | None:
        return self.outcome(plain[0], RenewalUnknown())

    def do_refused(self, plain: list[str], words: Words) -> str | None:
        reason = EndReason(plain[1])
        end = LeaseEnd(reason=reason, at=words["ended"]) if "ended" in words else None
        return self.outcome(plain[0], RenewalRefused(reason=reason, detail=words.get("detail", ""), end=end))

    def outcome(self, name: str, outcome: Outcome) -> str | None:
        done = self.told().take(self.attempts[name], outcome, self.now_ns)
        return None if done else "changes nothing"

    def do_notice(self, plain: list[str], words: Words) -> None:
        self.told().notice(
            self.now_ns, reason=EndReason(plain[0]), in_ns=_time(words["in"]), detail=words.get("detail", "")
        )

    def do_spare(self, plain: list[str], words: Words) -> None:
        self.told().cancel_notice(self.now_ns)

    def do_ended(self, plain: list[str], words: Words) -> str | None:
        end = LeaseEnd(reason=EndReason(plain[0]), at=words["at"], detail=words.get("detail", ""))
        return None if self.told().ended(end, self.now_ns) else "changes nothing"

    def do_let_go(self, plain: list[str], words: Words) -> None:
        self.told().begin_release(self.now_ns)

    def do_begin(self, plain: list[str], words: Words) -> None:
        self.told().begin(self.now_ns)

    def do_finish(self, plain: list[str], words: Words) -> None:
        self.told().finish(self.now_ns)

    def do_saves_take(self, plain: list[str], words: Words) -> None:
        self.told().use(self.told().policy, lead_ns=_time(plain[0]))

    def do_may_start(self, plain: list[str], words: Words) -> str:
        needs_ns = _time(plain[0]) if plain else None
        why_not = self.told().why_not_start(self.now_ns, needs_ns)
        return "yes" if why_not is None else f"no: {why_not}"


def _time(text: str) -> int:
    return parse_duration_ns(text, zero_ok=True)


def _said(instant_ns: int) -> str:
    return f"{instant_ns / 1e9:.3f}".rstrip("0").rstrip(".") + "s"
