"""How the end of a process is said in one number."""


def exit_code(returncode: int) -> int:
    """As a shell gives it: 128 + n for a process that died of signal n."""
    return returncode if returncode >= 0 else 128 - returncode
