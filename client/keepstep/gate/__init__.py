"""The gate: tells this process at each step whether to save or exit, the same on all ranks of a job."""

from keepstep.gate.gates import Action, Gate, Position, RanksGate, SingleProcessGate

__all__ = ["Action", "Gate", "Position", "RanksGate", "SingleProcessGate"]
