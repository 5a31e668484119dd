"""Chooses the cores of a lease where CPU time cannot be capped. Pure."""

from __future__ import annotations

from collections.abc import Iterable


def choose(count: int, allowed: Iterable[int], taken: Iterable[Iterable[int]]) -> tuple[int, ...]:
    """``count`` of the allowed cores: those that the fewest other leases are kept on, the lowest numbers first.

    ``taken`` are the cores of the other leases, one by one. With as many as there are, or more, it is all of them; with
    none asked for, or none allowed, nothing is to be kept anywhere.
    """
    found = sorted(set(allowed))
    if count <= 0:
        return ()
    use = dict.fromkeys(found, 0)
    for cores in taken:
        for core in cores:
            if core in use:
                use[core] += 1
    return tuple(sorted(sorted(found, key=lambda core: (use[core], core))[:count]))
