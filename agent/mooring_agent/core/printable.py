"""What others have written, as a terminal may show it."""


def printable(text: str) -> str:
    """`text` without what a terminal would obey or hide: such characters are shown as Python escapes them."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)
