"""How sizes and durations are written for people, on the command line and on pages."""


def amount(size_bytes: float) -> str:
    """Format a size as in `1.5 GiB`."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def age(seconds: float) -> str:
    """Format a duration as in `3.2 s`, `4 min`, `2.5 h` or `12 days`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    if seconds < 10 * 24 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / (24 * 3600):,.0f} days"
