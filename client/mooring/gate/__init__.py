"""The gate: what is asked of this process at a step, the same on all ranks of a job."""

from mooring.gate.gates import Action, Gate, Position, RanksGate, SingleProcessGate

__all__ = ["Action", "Gate", "Position", "RanksGate", "SingleProcessGate"]
