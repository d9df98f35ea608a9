"""Fixtures that tests of several areas share."""

pytest_plugins = ["tests.servers.fixtures"]
