"""What follows a framework's writes in the background: in their order, and never held up by one that hangs."""

import threading
from concurrent.futures import Future

from tests.harness.bounds import HANG_SECONDS

from keepstep.framework_run.after_save import BackgroundWrites


class Asked(Future[None]):
    """A write that is done, and notes that a later one has asked for it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()
        self.set_result(None)

    def done(self) -> bool:
        self.asked.set()
        return True


def test_work_for_an_earlier_write_that_is_done_comes_first() -> None:
    writes, first, order, second_ended = BackgroundWrites(), Asked(), list[int](), threading.Event()

    def slow(failure: BaseException | None) -> None:
        # If the second did not wait, it would end instead of asking.
        while not (first.asked.wait(0.01) or second_ended.is_set()):
            pass
        order.append(1)

    def quick(failure: BaseException | None) -> None:
        order.append(2)
        second_ended.set()

    writes.follow(first, slow)
    second: Future[None] = Future()
    writes.follow(second, quick)
    second.set_result(None)
    writes.wait()
    assert order == [1, 2]


def test_a_write_that_hangs_holds_up_no_later_one() -> None:
    writes, hanging, later, said = BackgroundWrites(), Future[None](), Future[None](), threading.Event()
    writes.follow(hanging, lambda failure: None)
    writes.follow(later, lambda failure: said.set())
    later.set_result(None)
    assert said.wait(HANG_SECONDS)
    hanging.set_result(None)
    writes.wait()


def test_what_a_write_failed_with_is_passed_on() -> None:
    writes, failed, cancelled, seen = BackgroundWrites(), Future[None](), Future[None](), list[str]()
    failed.set_exception(OSError("no space"))
    cancelled.cancel()
    for future in (failed, cancelled):
        writes.follow(future, lambda failure: seen.append(type(failure).__name__))
    writes.wait()
    assert seen == ["OSError", "CancelledError"]
