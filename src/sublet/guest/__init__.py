"""What runs inside a guest: where it stands (``current``), how a program is begun, and the zygotes guests come from.

Most of this runs in the interpreter of somebody else, which may have nothing of ours installed: standard library only.
"""
