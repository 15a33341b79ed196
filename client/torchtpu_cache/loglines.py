"""How what the loggers say reaches a job's standard error.

An application that configures logging gets our records like any others, through its own handlers. Where it has not,
Python would print the bare message, and nobody could tell whose it is: then each line begins with our name.

A library may do so at its import, though handlers are the application's to choose: this one is silent as soon as the
application has any for the record, sets no level, and leaves the records to go on to their parents.
"""

from __future__ import annotations

import logging
import sys
from typing import Final

SENDER: Final = "torchtpu-cache: "

_LOGGER: Final = "torchtpu_cache"


class _Named(logging.Handler):
    """Prints a record where no other handler would; thread-safe, and no fault of it leaves it."""

    def emit(self, record: logging.LogRecord) -> None:
        # Who sets lastResort to None wants silence from what has no handlers.
        if self._has_other_handlers(record.name) or logging.lastResort is None or sys.stderr is None:
            return
        try:
            lines = self.format(record).splitlines()
            sys.stderr.write("".join(f"{SENDER}{line}\n" for line in lines))
            sys.stderr.flush()
        except Exception:
            self.handleError(record)

    def _has_other_handlers(self, name: str) -> bool:
        logger: logging.Logger | None = logging.getLogger(name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return True
            logger = logger.parent if logger.propagate else None
        return False


_named = _Named()


def name_lines() -> None:
    """Has lines that nobody else prints begin with our name; harmless when called again."""
    logging.getLogger(_LOGGER).addHandler(_named)
