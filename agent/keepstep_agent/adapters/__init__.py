"""Implements the ports: object stores, the volume, the journal. Third-party exceptions stop here."""
