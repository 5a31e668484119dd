"""What runs inside a guest: where it stands (``current``), how a program is begun, and the zygotes guests come from.

Most of this runs in the user's interpreter, which may have nothing of ours installed: standard library only.
"""
