"""Context managers of generators, without the reference cycle that those of `contextlib` leave behind.

In Python 3.12.1 and 3.13.0 the frame of a generator that has ended keeps the frame of its caller
(https://github.com/python/cpython/issues/100964). For a context manager that is `__exit__`, which has the error of the
block in a variable. If the generator handles the error, both refer to each other, and all frames below, with the memory
of a save or the variables of a caller, stay until the collector runs. Here `__exit__` drops the error.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from functools import wraps
from types import TracebackType
from typing import Any, Generic, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")


class _Context(AbstractContextManager[T], Generic[T]):
    def __init__(self, steps: Iterator[T]) -> None:
        self._steps = cast(Generator[T, Any, Any], steps)

    def __enter__(self) -> T:
        return next(self._steps)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        try:
            if error is None:
                next(self._steps, None)
            else:
                self._steps.throw(error)
        except StopIteration:
            return True
        except BaseException as raised:
            # A generator raises a StopIteration of the block as the cause of a RuntimeError.
            if raised is not error and not (isinstance(error, StopIteration) and raised.__cause__ is error):
                raise
            error.__traceback__ = trace
        finally:
            del error, trace
        return False


def contextmanager(function: Callable[P, Iterator[T]]) -> Callable[P, AbstractContextManager[T]]:
    """Return a function that makes a context manager of a generator, as `contextlib.contextmanager` does."""

    @wraps(function)
    def make(*args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[T]:
        return _Context(function(*args, **kwargs))

    return make
