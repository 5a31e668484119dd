"""The part that knows the hardware and carries out grants.

``port`` is what a broker may ask of any agent, ``fence`` the table of who may touch what now, ``memory`` an agent whose
hardware is pretended (``machine``) and that keeps every rule of a real one.
"""
