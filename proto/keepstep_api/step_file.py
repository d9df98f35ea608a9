"""The step file: 32 bytes in which a rank says how far it is, without a call to the agent.

`<volume>/.keepstep/ranks/<local rank>.step` has one line: the step, a space and the unix time in seconds, padded with
spaces. A rank writes it over and over, at most about once a second, and empties it when its training has ended. When it
leaves for a termination notice, it adds the word `left` if that step is stored, and `lost` if it is not. What the file
of any other dead process says is the step at which its training was cut short. A torn read is possible and harmless:
the file is read again a moment later.
"""

import re
from dataclasses import dataclass
from enum import Enum
from typing import Final

SIZE_BYTES: Final = 32
SUFFIX: Final = ".step"
"""After the local rank, in the name of the file."""

_LINE: Final = re.compile(rb"([0-9]{1,12}) ([0-9]{1,11}(?:\.[0-9]{1,6})?)(?: (left|lost))? *\n")


class Leaving(str, Enum):
    """Whether the step is stored at which a rank has left."""

    LEFT = "left"
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """A rank was at `step` at that moment, by the wall clock that trainer and agent share.

    `leaving`: it has left there for a termination notice, and the step is stored or not; None while it trains.
    """

    step: int
    at_unix: float
    leaving: "Leaving | None" = None


def encode(record: StepRecord) -> bytes:
    """Return the file's whole content. Raises ValueError for what no reader would take."""
    when = f"{record.at_unix:.0f} {record.leaving.value}" if record.leaving else f"{record.at_unix:.3f}"
    content = f"{record.step} {when}".encode().ljust(SIZE_BYTES - 1) + b"\n"
    if decode(content) is None:
        raise ValueError(f"step {record.step} at {record.at_unix} is out of range")
    return content


def decode(content: bytes) -> "StepRecord | None":
    """Return what the file says. Anything else than such a line says nothing."""
    match = _LINE.fullmatch(content)
    if match is None:
        return None
    leaving = Leaving(match[3].decode()) if match[3] else None
    return StepRecord(step=int(match[1]), at_unix=float(match[2]), leaving=leaving)
