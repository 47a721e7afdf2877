"""On which line of a TOML file a key stands."""

from __future__ import annotations

import bisect
import dataclasses
import re

KeyPath = tuple[str | int, ...]


def key_lines(text: str) -> dict[KeyPath, int]:
    """Find the line of every table, key and array item in a valid TOML text.

    tomllib gives no positions, so this walks the text a second time. It reads what
    tomllib has accepted and checks nothing. Items of an array of tables share the
    path of the array.

    Returns:
        Key path → line, from 1; the line of a key is where it first appears.
    """
    lines: dict[KeyPath, int] = {}
    scan = _Scan(text, [match.start() for match in re.finditer("\n", text)], lines)
    table: KeyPath = ()
    position = scan.skip(0)
    while position < len(text):
        if text[position] == "[":
            brackets = 2 if text.startswith("[[", position) else 1
            table, position = scan.key(position + brackets, ())
            position = text.index("]", position) + brackets
        else:
            position = scan.pair(position, table)
        position = scan.skip(position)
    return lines


_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_KEY_PART = re.compile(
    r"""[ \t]*("(?:[^"\\\n]|\\.)*"|'[^'\n]*'|[A-Za-z0-9_-]+)[ \t]*"""
)
_STRING = re.compile(
    r'"""(?:\\[\s\S]|[^\\])*?"{3,5}(?!")'
    r"|'''[\s\S]*?'{3,5}(?!')"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'"
)
_BARE_VALUE = re.compile(r"[^,\]}#\n]*")


@dataclasses.dataclass(frozen=True)
class _Scan:
    """One walk over a TOML text; every method returns the position after it."""

    text: str
    newlines: list[int]
    lines: dict[KeyPath, int]

    def skip(self, position: int) -> int:
        """Blank space, line ends and comments."""
        return _match(_BLANK, self.text, position).end()

    def note(self, path: KeyPath, position: int) -> None:
        line = bisect.bisect_left(self.newlines, position) + 1
        self.lines.setdefault(path, line)

    def key(self, position: int, table: KeyPath) -> tuple[KeyPath, int]:
        """A dotted key; every prefix of it gets a line."""
        path = table
        while True:
            part = _match(_KEY_PART, self.text, position)
            name = part[1]
            if name[0] in "\"'":
                import tomllib

                name = tomllib.loads(f"key = {name}")["key"]
            path = (*path, name)
            self.note(path, part.start(1))
            position = part.end()
            if not self.text.startswith(".", position):
                return path, position
            position += 1

    def pair(self, position: int, table: KeyPath) -> int:
        """``key = value``."""
        path, position = self.key(position, table)
        return self.value(self.skip(position + 1), path)

    def value(self, position: int, path: KeyPath) -> int:
        text = self.text
        if text[position] == "[":
            return self.array(position + 1, path)
        if text[position] == "{":
            return self.inline_table(position + 1, path)
        string = _STRING.match(text, position)
        return (string or _match(_BARE_VALUE, text, position)).end()

    def array(self, position: int, path: KeyPath) -> int:
        index = 0
        position = self.skip(position)
        while self.text[position] != "]":
            self.note((*path, index), position)
            position = self.skip(self.value(position, (*path, index)))
            if self.text[position] == ",":
                position = self.skip(position + 1)
            index += 1
        return position + 1

    def inline_table(self, position: int, path: KeyPath) -> int:
        position = self.skip(position)
        while self.text[position] != "}":
            position = self.skip(self.pair(position, path))
            if self.text[position] == ",":
                position = self.skip(position + 1)
        return position + 1


def _match(pattern: re.Pattern[str], text: str, position: int) -> re.Match[str]:
    match = pattern.match(text, position)
    if match is None:
        raise ValueError(f"not TOML at character {position}: {pattern.pattern}")
    return match
