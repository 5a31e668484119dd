"""Host devices and CUDA devices behind one interface: memory, modules, launches.

``interface`` says what a device is. What decides is pure and stands by itself: ``memory`` (which piece lies where, and
whose), ``account`` (how much, to the byte), ``signature`` (whether arguments fit a kernel), ``grids`` (whether a launch
fits a device). ``tabled`` puts them in front of a device, so that every device refuses the same things in the same
words; ``host`` and ``cuda`` then do what is left. No GPU library is imported before it is used.
"""
