"""`Calibration`: fitted coefficients with what they were fitted to, how well they fit, and where they hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from moecost.catalog import data_folder, looks_like_path, read_yaml, write_text
from moecost.checked import Checked
from moecost.coefficients import COEFFICIENT_NAMES, PLAUSIBLE, Coefficients, hardware_key, slowed
from moecost.errors import InvalidInputError, UnknownNameError
from moecost.probe_record import ProbeRecord

Share = Annotated[float, Field(ge=0)]

NEW_LOG_SD: Final = {"software": 0.30, "architecture": 0.15, "method": 0.10}
"""What a stack, GPU architecture or method without a run adds to the spread of a step's time. A public source left out
of a fit is met within 27 % in the median (a spread of 0.35); the others are judgement."""
HALF_KNOWN_RUNS: Final = 5.0
"""Public runs that halve the variance which a stack, architecture or method adds: groups of runs left out of a joint
fit are met with a spread of 0.46 where the stack has no other run, 0.35 at 4 to 9 runs, 0.27 at 10 to 40, then 0.14."""
OWN_RUNS_COUNT: Final = 10.0
"""What a run counts in a fit of its stack alone: most of what differs between sources is common to its runs."""


class Coefficient(BaseModel):
    """One fitted or held number.

    Attributes
    ----------
    value : in the unit that `Coefficients` states.
    log_sd : one standard deviation of its logarithm, from the fit or, where held, of its prior.
    fitted : found by a fit; else held, for the reason given.
    why : where a held value comes from.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    value: Annotated[float, Field(gt=0)]
    log_sd: Share = 0.0
    fitted: bool = False
    why: str = ""


class Calibration(Checked):
    """Coefficients of the step for one software profile.

    `error` fields are means of |predicted / measured - 1|; `log_sd_*` are what `Estimate.interval` is made of: the
    spread of log(measured / predicted) that a new run of this stack is expected to have.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), defer_build=True)

    name: str
    software: str
    date: str
    coefficients: dict[str, Coefficient]
    covariance: dict[str, dict[str, float]] = Field(default={}, description="of the logarithms of the fitted ones")
    hardware_factors: dict[str, dict[str, Annotated[float, Field(gt=0)]]] = Field(
        default={}, description="factors on coefficients, by coefficient and `hardware_key`"
    )
    software_factors: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default={}, description="factor on the step's time by software profile, shrunk to 1"
    )
    num_runs: int = 0
    base: str = Field(default="", description="the calibration that the fit started from; empty: priors")
    base_error: Share | None = Field(default=None, description="of that calibration, on the runs of the fit")
    in_sample_error: Share | None = None
    cross_validated_error: Share | None = None
    cross_validated_by: str = ""
    log_sd_time: Share = 0.3
    log_sd_memory: Share = 0.1
    range: dict[str, tuple[float, float]] = Field(default={}, description="of the job fields it was fitted on")
    evidence: dict[str, dict[str, int]] = Field(
        default={}, description="runs it was fitted on, by `software`, `architecture` and `method`"
    )
    data: str = ""
    notes: tuple[str, ...] = ()
    probe: ProbeRecord | None = Field(default=None, description="the machine that it was probed on, and the timings")

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        """Coefficients that a file of an earlier version does not know are held at their general first value."""
        if isinstance(data, dict) and isinstance(data.get("coefficients"), dict):
            given = data["coefficients"]
            held = {
                n: {"value": v, "why": "general prior"} for n, v in asdict(Coefficients()).items() if n not in given
            }
            return {**data, "coefficients": {**given, **held}}
        return data

    @model_validator(mode="after")
    def _known(self) -> Calibration:
        unknown = set(self.coefficients) - set(COEFFICIENT_NAMES)
        if unknown:
            raise ValueError(f"coefficients {sorted(unknown)} are unknown; there are {', '.join(COEFFICIENT_NAMES)}")
        for name, c in self.coefficients.items():
            low, high = PLAUSIBLE[name].low, PLAUSIBLE[name].high
            if not low <= c.value <= high:
                raise ValueError(
                    f"coefficients.{name}={c.value:g} is not plausible; it lies between {low:g} and {high:g}"
                )
        return self

    @classmethod
    def load(cls, name_or_path: str | Path) -> Calibration:
        """A calibration that ships with moecost, or one that `save` wrote."""
        if looks_like_path(name_or_path):
            return _read(Path(name_or_path))
        return _shipped(str(name_or_path))

    def save(self, path: str | Path) -> None:
        """Write it as YAML, all at once: a reader sees the whole file or none, and what was there stays on failure.

        Raises
        ------
        InvalidInputError : the file cannot be written.
        """
        text = yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=110)
        write_text(path, text)

    @property
    def shared(self) -> bool:
        """Fitted on many stacks at once, rather than on one."""
        return bool(self.software_factors) and not self.base

    def values(
        self, architecture: str | None = None, software: str | None = None, compute_dtype: str | None = None
    ) -> Coefficients:
        """The numbers alone, for a GPU of that architecture, a profile and a compute type."""
        plain = {name: c.value for name, c in self.coefficients.items()}
        for name, factors in self.hardware_factors.items():
            plain[name] *= factors.get(hardware_key(architecture or "", compute_dtype), 1.0)
            plain[name] = min(plain[name], PLAUSIBLE[name].high)
        factor = self.software_factors.get(software or "", 1.0)
        return Coefficients(**({k: float(v) for k, v in slowed(plain, factor).items()} if factor != 1.0 else plain))

    def log_sd_of_thin_evidence(self, kinds: Mapping[str, str]) -> float:
        r"""Spread of the logarithm of a step's time that a job adds of whose kind few runs were seen.

        .. math:: \sqrt{\sum_k s_k^2 / (1 + n_k / n_0)}

        with :math:`n_0` of `HALF_KNOWN_RUNS`, fewer by `OWN_RUNS_COUNT` in a fit of the job's stack alone.

        Parameters
        ----------
        kinds : the job's `software`, `architecture` and `method`; a kind that `evidence` does not count adds nothing.
        """
        own = not self.shared and kinds.get("software") == self.software
        half = HALF_KNOWN_RUNS / (OWN_RUNS_COUNT if own else 1.0)
        counted = [(NEW_LOG_SD[kind], seen.get(value, 0)) for kind, value in kinds.items()
                   if (seen := self.evidence.get(kind))]  # fmt: skip
        return math.sqrt(sum(log_sd**2 / (1 + n / half) for log_sd, n in counted))

    def with_values(self, values: Mapping[str, float]) -> Calibration:
        """The same with some coefficients replaced."""
        new = {k: c.model_copy(update={"value": values[k]}) if k in values else c for k, c in self.coefficients.items()}
        return self.model_copy(update={"coefficients": new})

    def summary(self) -> str:
        """What it was fitted on, how far off it was before and after, and what the runs have moved."""
        runs = f"{self.num_runs} run{'' if self.num_runs == 1 else 's'} of {self.software}"
        errors = [f"{100 * e:.1f} % {what}" for e, what in (
            (self.base_error, f"with {self.base}"), (self.in_sample_error, "after the fit"),
            (self.cross_validated_error, "where left out")) if e is not None]  # fmt: skip
        moved = [f"{name} = {self._number(name):.3g} (spread {100 * row[name] ** 0.5:.0f} %)"
                 for name, row in self.covariance.items()]  # fmt: skip
        lines = [f"{self.name}: {runs}", f"mean error: {', '.join(errors) or 'not known'}"]
        return "\n".join([*lines, f"fitted: {', '.join(moved) or 'nothing'}"])

    def _number(self, name: str) -> float:
        """Of a name in `covariance`: a coefficient, or a factor on one of a GPU architecture or a stack."""
        what, _, where = name.partition(" of ")
        if not where:
            return self.coefficients[what].value
        return self.software_factors[where] if what == "time" else self.hardware_factors[what][where]

    def __str__(self) -> str:
        return self.summary()

    def __repr__(self) -> str:
        error = "None" if self.in_sample_error is None else f"{self.in_sample_error:.3g}"
        return (
            f"Calibration({self.name!r}, software={self.software!r}, num_runs={self.num_runs}, in_sample_error={error})"
        )

    def __hash__(self) -> int:
        return hash((self.name, self.software, self.date, self.data))


def calibration_names() -> tuple[str, ...]:
    """Names of the calibrations that ship with moecost."""
    return tuple(sorted(p.stem for p in (data_folder("data") / "calibrations").glob("*.yaml")))


@cache
def _shipped(name: str) -> Calibration:
    if name not in calibration_names():
        known = calibration_names()
        raise UnknownNameError("calibration", name, known, f"Known: {', '.join(known)}; or give a path.")
    return _read(data_folder("data") / "calibrations" / f"{name}.yaml")


def _read(path: Path) -> Calibration:
    try:
        return Calibration.model_validate(read_yaml(path))
    except InvalidInputError as error:
        raise InvalidInputError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from None
