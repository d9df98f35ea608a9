"""What was found wrong or worth saying while a pod was looked at: everything is said at once, not one at a time."""

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Findings:
    """`problems` forbid the injection. Each text says what is the matter and, after it, what to do about it."""

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
