"""What programs write, as tests judge it."""

from __future__ import annotations


def without_name_service(text: str) -> str:
    """``text`` without c10d's remark that a name server did not answer for a peer: that is the machine's network."""
    remark = "[c10d] The hostname of the client socket cannot be retrieved"
    return "".join(line for line in text.splitlines(keepends=True) if remark not in line)
