"""Numbers of bytes for readers."""


def readable(num_bytes: int | float) -> str:
    """`512 B`, `16.0 KiB`, `3.2 MiB`, `1.25 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"
