"""One kind of object, what becomes of it on the way to a device and back, and how that is told."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Kind", "anew", "by_name", "refused", "travels"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """It is called ``x``; what is related to it has other names."""

    name: str
    """For people: a row of docs/notebook-objects.md."""
    make: str
    """Statements that bind it."""
    same: str
    """True of it wherever it is, as long as nobody changed it."""
    change: str = ""
    """Statements that change it without binding x; empty if it cannot change."""
    after: str = ""
    """True of it then."""
    why: str = ""
    """It is not sent, and this is said of it; what ``same`` says is then true where it was made."""
    anew: bool = False
    """Where a cell changed it, its names are bound to the new one: who holds the old one otherwise keeps that."""
    by_name: bool = False
    """The other side has its own under the same name: changes of it do not travel."""
    close: str = ""
    """Statements that close what it holds open, where it was made."""
    note: str = ""
    """What people should know besides."""

    @property
    def verdict(self) -> str:
        """In a few words."""
        if self.why:
            return f"not sent: {self.why}"
        if self.by_name:
            return "sent by name"
        if self.anew:
            return "sent; a changed one is bound in its place"
        return "sent; changed in place" if self.change else "sent"


def travels(name: str, make: str, same: str, change: str = "", after: str = "", note: str = "") -> Kind:
    return Kind(name=name, make=make, same=same, change=change, after=after, note=note)


def anew(name: str, make: str, same: str, change: str = "", after: str = "", note: str = "") -> Kind:
    return Kind(name=name, make=make, same=same, change=change, after=after, anew=True, note=note)


def by_name(name: str, make: str, same: str, note: str = "") -> Kind:
    return Kind(name=name, make=make, same=same, by_name=True, note=note)


def refused(name: str, make: str, why: str, same: str = "x is not None", note: str = "", close: str = "") -> Kind:
    return Kind(name=name, make=make, same=same, why=why, note=note, close=close)
