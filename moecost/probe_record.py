"""What a probe measured on a machine: kept beside the coefficients that it implies, in one file."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

PROBED: Final = "probed"
"""How the reason of a coefficient begins that a probe has measured."""
Seconds = Annotated[float, Field(gt=0)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)


class Timing(_Record):
    """One piece of work, timed several times."""

    kind: str = Field(description="`gemm`, `attention`, `moe`, `allreduce`, ...; `moecost.probe.tasks` describes each")
    dtype: str
    sizes: dict[str, int]
    how: str = Field(default="", description="the pass, or the way it is run")
    seconds: Seconds = Field(description="median of the repeats. [s]")
    spread: float = Field(ge=0, description="interquartile range of the repeats over their median")
    repeats: int = Field(ge=1)
    predicted: Seconds | None = Field(default=None, description="with the implied coefficients; None: has no law. [s]")


class Peaks(_Record):
    """The rates that shares are of."""

    flops_per_s: dict[str, float] = Field(description="dense, by data type. [FLOP/s]")
    bytes_per_s: float = Field(gt=0, description="memory. [byte/s]")
    num_sms: int | None = Field(default=None, description="None: products are taken to fill the device evenly")
    link_bytes_per_s: float | None = Field(default=None, description="between two GPUs, one way. [byte/s]")
    link_is_pcie: bool = False


class ProbeRecord(_Record):
    """A machine, when and with what it was probed, and all timings."""

    device: str = Field(description="a GPU's name in the catalogue, or `cpu`, or the device's own name")
    device_name: str
    num_devices: int = 1
    driver: str = ""
    versions: dict[str, str] = {}
    date: str
    complete: bool = Field(description="False: the probe was ended before it had done all")
    peaks: Peaks
    peaks_of: Literal["catalogue", "measured"] = Field(
        description="shares are of the catalogue's peaks, or of the highest rates that were measured here"
    )
    timings: tuple[Timing, ...] = ()
    notes: tuple[str, ...] = ()

    def why_not_for(self, gpu: str) -> str | None:
        """Why its coefficients cannot serve a job on a GPU of the catalogue; None where they can.

        Parameters
        ----------
        gpu : canonical name of the job's GPU.
        """
        if self.device == gpu or self.peaks_of == "catalogue":
            return None
        return (
            f"it was probed on {self.device_name!r} ({self.device}), and its shares are of rates measured there, not "
            f"of the peaks of {gpu}; probe a machine with that GPU"
        )
