"""What Slurm makes of a list of hosts, written independently of the code that makes the list."""

from __future__ import annotations


def expand(text: str) -> list[str]:
    """The hosts of a list such as ``gpu-[0-2,07],login``; escapes of foreign characters are undone."""
    found: list[str] = []
    for piece in _split(text):
        prefix, bracket, ranges = piece.partition("[")
        if not bracket:
            found.append(prefix)
            continue
        assert ranges.endswith("]")
        for one in ranges[:-1].split(","):
            first, _, last = one.partition("-")
            found += [f"{prefix}{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)]
    return [one.encode("latin-1", "backslashreplace").decode("unicode_escape") for one in found]


def _split(text: str) -> list[str]:
    """The pieces between commas that stand outside brackets."""
    pieces, depth, now = [], 0, ""
    for character in text:
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            pieces.append(now)
            now = ""
        else:
            now += character
    return [*pieces, now] if text else []
