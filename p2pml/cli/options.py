"""Arguments that several commands share, and their types: what makes no sense is told in one line that names it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from p2pml.address import Address
from p2pml.cli.outcome import Misuse
from p2pml.errors import AddressError
from p2pml.loops import KINDS

Part = tuple[int, int]
"""A part of the training data, counted from 0, and of how many."""

INSECURE = (
    "listening beyond this machine is refused without --insecure: links are neither encrypted nor authenticated yet, so "
    "whoever reaches the port can join, and can read and change the model"
)


def add_shared(parser: argparse.ArgumentParser) -> None:
    """What `start`, `join` and `demo` have in common."""
    parser.add_argument("-v", "--verbose", action="count", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    parser.add_argument("--loop", choices=KINDS, default="auto", help="event loop (default: uvloop where installed)")
    parser.add_argument(
        "--report",
        choices=("auto", "lines", "json"),
        default="auto",
        help="progress as plain lines, or as one JSON object per line; default: live on a terminal, lines elsewhere",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures of the whole run to FILE as well")


def add_training(parser: argparse.ArgumentParser) -> None:
    """What is trained and how: for whoever opens the group."""
    parser.add_argument(
        "--task",
        default="watch",
        help="watch (exercises seen by a smartwatch), mnist5k (digits), or your own as module:function (default: watch)",
    )
    parser.add_argument("--peers", type=at_least(1), default=4, metavar="N", help="peers to train with (default: 4)")
    parser.add_argument("--rounds", type=at_least(1), metavar="N", help="rounds (default: the task's number of epochs)")
    parser.add_argument(
        "--steps-per-round",
        type=at_least(1),
        metavar="N",
        help="optimizer steps of each peer in a round (default: once through its data)",
    )
    parser.add_argument(
        "--weighting",
        choices=("equal", "samples"),
        default="equal",
        help="what a peer counts for: all the same, or by the examples it trained on (default: equal)",
    )
    parser.add_argument(
        "--combine",
        choices=("parameters", "delta"),
        default="parameters",
        help="average the peers' models, or what changed in them (default: parameters)",
    )
    parser.add_argument("--seed", type=at_least(0), default=0, metavar="N", help="of all randomness (default: 0)")


def add_peer(parser: argparse.ArgumentParser) -> None:
    """What any single peer can be told."""
    parser.add_argument(
        "--name", type=name, help="this peer's id, unlike all others' (default: host name and a number)"
    )
    parser.add_argument("--threads", type=at_least(1), metavar="N", help="threads for torch (default: torch's choice)")
    parser.add_argument(
        "--checkpoint", type=Path, metavar="PATH", help="write the group's model to PATH.safetensors after each round"
    )
    parser.add_argument(
        "--insecure", action="store_true", help="listen beyond this machine, although links are not yet secured"
    )
    parser.add_argument("--verify", type=Path, metavar="DIR", help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)


def at_least(least: int) -> Callable[[str], int]:
    """The type of an argument that is an integer from `least` on."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} on")
        return value

    return read


def address(text: str) -> Address:
    """The type of an argument that is an address."""
    try:
        return Address.parse(text)
    except AddressError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def seconds(text: str) -> float:
    """The type of an argument that is a time."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no time in seconds")
    return value


def name(text: str) -> str:
    """The type of an argument that is a peer id."""
    if not 0 < len(text) <= 64 or not text.isprintable() or any(character.isspace() for character in text):
        raise argparse.ArgumentTypeError(f"{text!r} is no peer id: 1 to 64 printable characters without spaces")
    return text


def part(text: str) -> Part | None:
    """The type of an argument like '2/4', the second of four parts: (1, 4); None for 'auto'."""
    if text == "auto":
        return None
    first, slash, second = text.partition("/")
    if not (slash and first.isdecimal() and second.isdecimal() and 1 <= int(first) <= int(second)):
        raise argparse.ArgumentTypeError(f"{text!r} is no part: it looks like 2/4, the second of four, or is 'auto'")
    return int(first) - 1, int(second)


def check_listen(addresses: list[Address], insecure: bool) -> None:
    """Raise `Misuse` if one leads beyond this machine and nobody said that this is meant."""
    for one in addresses:
        if not one.is_loopback and not insecure:
            raise Misuse(f"{one}: {INSECURE}")


def as_flags(arguments: argparse.Namespace, *names: str) -> list[str]:
    """Arguments as they are given to a command, without those that are None."""
    flags: list[str] = []
    for each in names:
        value: Any = getattr(arguments, each)
        if value is not None:
            flags += [f"--{each.replace('_', '-')}", str(value)]
    return flags
