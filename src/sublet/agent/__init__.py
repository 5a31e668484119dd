"""The part that knows the hardware and carries out grants.

``port`` is what a broker may ask of any agent, ``memory`` an agent whose hardware is pretended (``machine``,
``pretended``) and that keeps every rule of a real one: those are in ``lease.node``, for both.
"""
