"""Memory that the process keeps, as PyTorch keeps an accelerator's."""

import ctypes
import platform

# glibc's malloc.h
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4


def keep_freed_memory() -> bool:
    """Let the process keep the memory that it frees; return whether it does.

    By default glibc gives large blocks back to the system, and whoever asks
    next pays for fresh pages: from nothing to a third of a forward pass,
    depending on who ran before. Now only the first few passes do. Other C
    libraries are left as they are.

    Source: the GNU C Library's manual, "Malloc Tunable Parameters".
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    no_blocks_apart = mallopt(M_MMAP_MAX, 0)
    return bool(mallopt(M_TRIM_THRESHOLD, 2**31 - 1) and no_blocks_apart)
