"""Decides what may be deleted from a destination. The last good checkpoint always stays.

Owns the verdict over a listing, whole or down to a horizon; deletes nothing itself. Announced checkpoints are one
series, and the snapshots of each node another. Invariants:

- A committed save is deleted only if no policy wants it, and `keep_last` newer saves of its series justify it, each of
  them validated and none skipped. So of each series the newest by step, the one committed last and the only valid one
  always stay.
- Its marker is deleted before its data, so no reader sees a marker whose data is being deleted.
- Of a snapshot only those objects are deleted that no remaining snapshot names (docs/design/0014).
- Objects that do not prove to be a save of Keepstep are left alone.
"""
