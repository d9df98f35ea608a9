"""The gate: what is asked of this process at a step, the same on all ranks of a job."""

from mooring.gate.ask import Ask, Gate, Position
from mooring.gate.ranks import RanksGate
from mooring.gate.single import SingleProcessGate

__all__ = ["Ask", "Gate", "Position", "RanksGate", "SingleProcessGate"]
