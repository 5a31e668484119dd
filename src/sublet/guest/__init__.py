"""What runs inside a guest: ``current``, the start of its program, and the zygotes from which guests are forked.

Most of this runs in the user's interpreter, which may have nothing of ours installed: standard library only.
"""
