"""What a failure comes to: a sentence where crossdock has one, and an exit code."""

from __future__ import annotations

import inspect

from crossdock import errors
from crossdock.testing import RanksFailed

WRONG_VALUE, FAILED, INTERRUPTED = 2, 1, 130
REFUSALS = ("BackendUnavailable", "ConfigError", "InvalidInput")
_ECHO = "PeerTimeout"  # of ranks that waited in vain for one that has more to tell
_OURS = {name for name, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.CrossdockError)}


def sentence_of(failure: BaseException) -> str:
    """Its own message; of ranks that all came to an error of crossdock, the first one's that says most.

    Everything that is known where a rank came to something else: a fault that nobody foresaw.
    """
    if not isinstance(failure, RanksFailed):
        return str(failure)
    failed = [result for result in failure.results if not result.ok and not result.silent]  # those wait for the others
    if not failed or any(result.error_type not in _OURS for result in failed):
        return str(failure)
    return min(failed, key=lambda result: result.error_type == _ECHO).message


def line_of(failure: RanksFailed) -> str:
    """Which ranks failed, and how the one ended that says most: an exception before a death before silence."""
    failed = [result for result in failure.results if not result.ok]
    told = min(failed, key=lambda result: (result.silent, not result.error_type, result.error_type == _ECHO))
    said = f"{told.error_type}: {told.message}" if told.error_type else str(told)
    return ": ".join(text.partition("\n")[0] for text in (str(failure), said))


def exit_code_of(failure: BaseException) -> int:
    """2 where a value was refused, else 1."""
    if isinstance(failure, RanksFailed):
        kinds = {result.error_type for result in failure.results if not result.ok}
        return WRONG_VALUE if kinds <= {*REFUSALS} else FAILED
    return WRONG_VALUE if type(failure).__name__ in REFUSALS else FAILED
