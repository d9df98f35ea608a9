"""Spot and maintenance notices, as `ports.Notices`: one module for each cloud's metadata service."""
