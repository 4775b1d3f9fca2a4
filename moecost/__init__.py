"""What fine-tuning a large language model needs, takes and costs, before you pay for it."""

import typing as _typing

from moecost.architecture import ModelSpec
from moecost.calibration import Calibration
from moecost.catalog import gpus, models, nodes
from moecost.dataset_spec import DatasetSpec
from moecost.dataset_spec import dataset_names as datasets
from moecost.errors import MoECostError
from moecost.estimation import estimate
from moecost.job import Job
from moecost.results import Estimate
from moecost.software import SoftwareProfile, software_profiles
from moecost.specs import GPUSpec, NodeSpec, PriceQuote

if _typing.TYPE_CHECKING:
    from moecost.measurements import MeasuredRun
    from moecost.sweeping import Sweep, sweep, sweep_to_parquet

__all__ = [
    "Calibration",
    "DatasetSpec",
    "Estimate",
    "GPUSpec",
    "Job",
    "MeasuredRun",
    "MoECostError",
    "ModelSpec",
    "NodeSpec",
    "PriceQuote",
    "SoftwareProfile",
    "Sweep",
    "datasets",
    "estimate",
    "gpus",
    "models",
    "nodes",
    "software_profiles",
    "sweep",
    "sweep_to_parquet",
]


def __getattr__(name: str) -> _typing.Any:
    """Names that an estimate does not need are imported when asked for."""
    if name == "MeasuredRun":
        from moecost.measurements import MeasuredRun

        return MeasuredRun
    if name in ("Sweep", "sweep", "sweep_to_parquet"):
        from moecost import sweeping

        return getattr(sweeping, name)
    if name == "__version__":
        from importlib.metadata import version

        return version("moecost")
    raise AttributeError(f"module 'moecost' has no attribute {name!r}")
