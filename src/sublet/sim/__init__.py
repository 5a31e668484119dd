"""The proof: the real ledger, agent, fence and renewal in a pretended world that breaks by a seed.

::

    python -m sublet.sim --seeds 1000            # both modes, the counters, and the seeds that failed
    python -m sublet.sim --from 4711 --seeds 1   # one seed again
    python -m sublet.sim --mutants               # known bugs of other systems, each caught or not

A ``World`` is a queue of moments. Around it stand processes with clocks of their own (``process``), a network that
loses, doubles, delays and cuts (``net``), and a disk that forgets what was not synced (``disk``). The processes run the
code of the product: ``office`` drives a ``Ledger`` as the driver does, ``node`` a ``MemoryAgent``, ``holder`` a
``RenewalManager``. ``watch`` looks on and compares what agents and holders *saw* with what was promised.

``scenario`` draws from the seed what there is and what goes wrong; ``faults`` makes it happen; ``coverage`` counts
which fault met a lease in which state.
"""
