"""Give freed memory back to the system.

glibc keeps freed blocks of up to 32 MB for later ones. Decompositions and averages free many large temporaries of all
sizes, whose remains would add up to the size of the model.
"""

import ctypes


def _malloc_trim() -> "ctypes._FuncPointer | None":
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library, or another system
        return None


_TRIM = _malloc_trim()


def release_freed_memory() -> None:
    """Return the pages of freed blocks to the system, where the C library can."""
    if _TRIM is not None:
        _TRIM(0)
