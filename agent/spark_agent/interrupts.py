"""Ctrl-C while native code computes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["interrupts_at_checks", "unless"]


@contextmanager
def interrupts_at_checks() -> Iterator[Callable[[], None]]:
    """Yield a function that raises :class:`KeyboardInterrupt` if Ctrl-C was pressed since the block began.

    At the block's end it is raised, too, if no check came after it. Python raises it wherever it happens to be, which
    most of the time is inside llama.cpp's callback: there it is printed and lost, and leaves a half-read layer. A
    second Ctrl-C does not wait for a check.
    """
    usual = signal.getsignal(signal.SIGINT)
    pressed = False

    def note(_number: int, _frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, second)

    def second(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = False
        signal.default_int_handler(number, frame)

    def check() -> None:
        nonlocal pressed
        if pressed:
            pressed = False
            raise KeyboardInterrupt

    # A process started in the background ignores the signal, and shall go on doing so.
    if usual is not signal.default_int_handler:
        yield check
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, usual)
    check()


def unless(check: Callable[[], None]) -> Callable[[], bool]:
    """A question that is always answered with yes, unless ``check`` raises."""

    def answer() -> bool:
        check()
        return True

    return answer
