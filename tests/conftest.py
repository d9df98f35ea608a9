"""Fixtures that tests of several areas share."""

import signal

pytest_plugins = ["tests.servers.fixtures"]


def pytest_configure() -> None:
    # Started in the background of a shell, or by nohup, we ignore these, and so would every process that we start.
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
