"""What runs on leased devices: sessions with memory and kernels, and Python functions in workers.

Each public name is fetched on first use by ``import sublet``; nothing here loads CUDA, torch or Warp. What computes,
computes in guests (``guest/``, ``devices/``); this room is the holder's half, on top of ``client/``.
"""
