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
    from moecost.comparing import Comparison, compare
    from moecost.measurements import MeasuredRun
    from moecost.planning import Plan, plan
    from moecost.sweeping import Sweep, sweep, sweep_to_parquet
    from moecost.watching import Watch, watch

__all__ = [
    "Calibration",
    "Comparison",
    "DatasetSpec",
    "Estimate",
    "GPUSpec",
    "Job",
    "MeasuredRun",
    "MoECostError",
    "ModelSpec",
    "NodeSpec",
    "Plan",
    "PriceQuote",
    "SoftwareProfile",
    "Sweep",
    "Watch",
    "compare",
    "datasets",
    "estimate",
    "gpus",
    "models",
    "nodes",
    "plan",
    "software_profiles",
    "sweep",
    "sweep_to_parquet",
    "watch",
]

_LAZY: _typing.Final = {
    "Comparison": "moecost.comparing",
    "MeasuredRun": "moecost.measurements",
    "Plan": "moecost.planning",
    "Sweep": "moecost.sweeping",
    "Watch": "moecost.watching",
    "compare": "moecost.comparing",
    "plan": "moecost.planning",
    "sweep": "moecost.sweeping",
    "sweep_to_parquet": "moecost.sweeping",
    "watch": "moecost.watching",
}
"""Names that an estimate does not need, and where they are."""


def __getattr__(name: str) -> _typing.Any:
    """A name of `_LAZY` is imported when asked for."""
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    if name == "__version__":
        from importlib.metadata import version

        return version("moecost")
    raise AttributeError(f"module 'moecost' has no attribute {name!r}")
