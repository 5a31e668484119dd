"""The rules that no seed may break, by the short names under which they are reported."""

from __future__ import annotations

from typing import Final

RULES: Final[dict[str, str]] = {
    "L1": "at most one lease is on an exclusive device at any instant, as the hardware sees it; nobody reads leftovers",
    "L2": "an epoch is given out once, rises, and is durable before anybody hears of it",
    "L3": "the hardware takes effects of live (lease, epoch) pairs only, and epochs on a device never go back",
    "L4": "a slice becomes free only after an agent looked and found nothing; no teardown touches a live neighbour",
    "L5": "no lease ends before the time that was promised, and none stays when its time is over",
    "L6": "a holder's own deadline comes before the agent's and the office's; a promise is held by the agent first",
    "L7": "after its own deadline a holder starts nothing, and before it silence is no reason to give up",
    "L8": "no lease comes back after its end, and no late renewal is answered with yes",
    "L9": "an office that was replaced commands nobody",
    "L10": "restarts lengthen no lease; a silent holder's lease ends within two times its time to live",
    "L12": "every lease ends exactly once, for one reason",
    "L13": "without activity, or beyond the maximum hold while others wait, nothing is renewed",
    "L15": "a request that is repeated has one effect",
    "S2": "every request is answered, and nothing goes round in circles",
    "S3": "once a core is healed, everything comes to rest within a bound and newcomers are served",
    "S4": "nothing is free while a request waits that it would fit",
    "S6": "an interactive request does not wait behind a spot lease for longer than notice and teardown take",
    "S7": "who may not be preempted (minimum run, interactive) is not",
    "S8": "who is preempted had the notice of the tier, and was not taken before its moment",
    "S10": "an idle holder yields after a rest, and not before its guests are parked, gone or have the time to save",
    "S9": "what tenants used is what devices were leased, to the nanosecond",
    "P1": "a parked guest has a live parking lease, or is being ended; it acts under no epoch of a device",
    "P2": "what is parked goes on once, under one lease, and for nobody who holds an older epoch of it",
    "P3": "whoever was told that his guests are parked finds them, for as long as the parking lease lives",
    "P4": "what is parked is set going to save before it is killed, wherever the end of its parking lease leaves time",
    "G1": "no grant brings a group above its ceiling",
    "G2": "what is reserved for a group goes to others only while it is lent, and only as spot",
    "H1": "no lease ends with a process that lives, or that is not its holder's",
    "H2": "a lease that is bound to a process ends within a bound when the process has ended",
    "V1": "no volume is taken off its disk while the office has it in its books",
    "V2": "no volume lies on a disk without anybody knowing of it",
    "V3": "what the books keep is on its disk",
    "books": "the invariants of the ledger's own books (S1: never more given out than there is)",
    "fold": "what the journal comes to is what the office knew",
    "error": "no part raises what it did not mean to",
}
