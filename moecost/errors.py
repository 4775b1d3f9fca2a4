"""Everything moecost raises derives from `MoECostError`; each message names the value, the field and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MoECostError(Exception):
    """Base of all errors raised by moecost."""


class InvalidInputError(MoECostError, ValueError):
    """A field of a job, a spec or a file has a value that cannot be used."""


class UnknownNameError(MoECostError, KeyError):
    """A name is in no catalogue; the message lists the nearest ones."""

    def __init__(self, kind: str, name: str, known: Iterable[str], hint: str = "") -> None:
        self.kind, self.name = kind, name
        self.nearest = close_matches(name[:200], known)
        text = f"unknown {kind} {name!r:.80}"
        text += f"; did you mean {', '.join(repr(n) for n in self.nearest)}?" if self.nearest else "."
        self.message = f"{text} {hint}".strip()
        super().__init__(self.message)

    def __str__(self) -> str:  # KeyError would print the repr
        return self.message

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_unknown_name, (self.kind, self.name, self.nearest, self.message)


def _rebuild_unknown_name(kind: str, name: str, nearest: list[str], message: str) -> UnknownNameError:
    error = UnknownNameError(kind, name, ())
    error.nearest, error.message = nearest, message
    return error


class UnsupportedError(MoECostError):
    """The job is valid, but moecost does not model it."""


class UnsupportedModelError(UnsupportedError):
    """A model config has a type, or a field that changes its shape, which is not understood."""


class DoesNotFitError(MoECostError):
    """The job needs more memory than the GPU has, even at the smallest batch."""


class NoPriceError(MoECostError):
    """No quote matches the wish; the message lists the quotes there are."""


class WorkerError(MoECostError):
    """A worker that computes a part of a sweep has failed; the cause is chained."""


class FitError(MoECostError):
    """The measurements cannot determine the coefficients that were asked for."""


class FitWarning(UserWarning):
    """A fit does no better than what it started from."""


class OutOfRangeWarning(UserWarning):
    """A fitted law is used outside the range of the data it was fitted to."""


def close_matches(name: str, known: Iterable[str], count: int = 4) -> list[str]:
    """Names nearest to `name`, ignoring case and punctuation, best first."""
    plain = {k: _plain(k) for k in known}
    by_plain: dict[str, str] = {}
    for k, p in plain.items():
        by_plain.setdefault(p, k)
    wanted = _plain(name)
    found = difflib.get_close_matches(wanted, by_plain, n=count, cutoff=0.55)
    found += [p for p in by_plain if len(wanted) > 2 and wanted in p and p not in found]
    return [by_plain[p] for p in found[:count]]


def _plain(text: str) -> str:
    return "".join(c for c in text.lower() if c.isalnum())
