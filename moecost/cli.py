"""The command line. Data goes to stdout, warnings and errors to stderr; what a command needs is imported when it runs.

Exit status: 0 done, 1 does not fit, 2 bad input.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer
from typer.core import TyperGroup

from moecost.errors import DoesNotFitError, InvalidInputError, MoECostError, OutOfRangeWarning

if TYPE_CHECKING:
    from moecost.architecture import ModelSpec
    from moecost.calibration import Calibration
    from moecost.job import Job
    from moecost.measurements import Runs
    from moecost.prices import PriceBook
    from moecost.specs import GPUSpec

DONE, DOES_NOT_FIT, BAD_INPUT = 0, 1, 2
NARROWEST: Final = 80
"""Columns that a table needs; a narrower terminal breaks its lines."""
UNBOUNDED: Final = 10_000
"""Columns of a table where the output is not a terminal: whoever reads a pipe wants whole lines."""


class _Group(TyperGroup):
    """Turns what moecost raises and warns into one line on stderr and an exit status."""

    def invoke(self, ctx: Any) -> Any:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", OutOfRangeWarning)
            try:
                return super().invoke(ctx)
            except DoesNotFitError as error:
                _say("does not fit", error)
                raise typer.Exit(DOES_NOT_FIT) from None
            except MoECostError as error:
                _say("error", error)
                raise typer.Exit(BAD_INPUT) from None
            finally:
                for text in dict.fromkeys(str(warning.message) for warning in caught):
                    _say("warning", text)


app = typer.Typer(
    cls=_Group,
    help="What fine-tuning a large language model needs, takes and costs, before you pay for it.",
    epilog="Exit status: 0 done, 1 does not fit, 2 bad input.",
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help starts quickly and reads the same in a pipe
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Filter = Annotated[str | None, typer.Argument(metavar="FILTER", help="Part of a name or alias.", show_default=False)]


# ------------------------------------------------------------------------------------------------------- commands
def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        _write(f"moecost {version('moecost')}\n")
        raise typer.Exit(DONE)


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    pass


def _names(of: str) -> Callable[[str], list[str]]:
    """Completion from a catalogue of the package; a completion that fails completes nothing."""

    def complete(incomplete: str) -> list[str]:
        import moecost

        try:
            return [name for name in getattr(moecost, of)() if name.startswith(incomplete)]
        except MoECostError:
            return []

    return complete


def _calibrations(incomplete: str) -> list[str]:
    from moecost.calibration import calibration_names

    return [name for name in calibration_names() if name.startswith(incomplete)]


def _words(*words: str) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return complete


def _option(name: str, text: str, complete: Callable[[str], list[str]] | None = None, metavar: str = "TEXT") -> Any:
    return typer.Option(name, help=text, autocompletion=complete, metavar=metavar, show_default=False)


_JOB_FILE = typer.Argument(metavar="JOB.yaml", help="A file with the fields of a job, or a recipe.", show_default=False)
_MODEL = _option("--model", "Name, Hub id, spec or config.json.", _names("models"))
_GPU = _option("--gpu", "Name, alias or cloud instance type.", _names("gpus"))
_NUM_GPUS = _option("--num-gpus", "All GPUs of the run.", metavar="INTEGER")
_DATASET = _option("--dataset", "Name, or file of lengths.", _names("datasets"))
_LENGTH = _option("--sequence-length", "Longest sequence, in tokens.", metavar="INTEGER")
_METHOD = _option("--method", "full, lora, qlora or dora.", _words("full", "lora", "qlora", "dora"))
_RANK = _option("--lora-rank", "Rank of the adapters.", metavar="INTEGER")
_TARGETS = _option(
    "--lora-targets",
    "Module names or keywords, comma separated.",
    _words("all-linear", "attention", "experts"),
    "NAME,...",
)
_EPOCHS = _option("--epochs", "Passes over the data.", metavar="NUMBER")
_QUERIES = _option("--num-queries", "Training queries an epoch.", metavar="INTEGER")
_BATCH = _option("--micro-batch-size", "Sequences a GPU a pass; the largest that fits.", metavar="INTEGER")
_ACCUMULATION = _option("--gradient-accumulation-steps", "Micro-batches a step.", metavar="INTEGER")
_CHECKPOINTING = _option("--gradient-checkpointing", "none, selective or full.", _words("none", "selective", "full"))
_ZERO = _option("--zero-stage", "What is sharded over GPUs, 0 to 3; FSDP is 3.", _words("0", "1", "2", "3"), "INTEGER")
_SOFTWARE = _option("--software", "Training stack; `moecost software` lists them.", _names("software_profiles"))
_COEFFICIENTS = _option("--calibration", "Name, or file that `moecost fit` wrote.")
_PRICE = _option("--price", "$/GPU-hour, or a provider.", metavar="NUMBER|NAME")
_PRICES = typer.Option("--prices", help="Price table; its median is the price.", metavar="FILE", show_default=False)
_MARKET = _option("--market", "on_demand, spot or reserved.", _words("on_demand", "spot", "reserved"))
_ON_OOM = _option("--on-oom", "raise, or report figures all the same.", _words("raise", "report"))
_SET = typer.Option("--set", help="Any other field, its value as in YAML; may be repeated.", metavar="FIELD=VALUE")


@app.command(no_args_is_help=True)
def estimate(
    ctx: typer.Context,
    job: Annotated[Path | None, _JOB_FILE] = None,
    model: Annotated[str | None, _MODEL] = None,
    gpu: Annotated[str | None, _GPU] = None,
    num_gpus: Annotated[int | None, _NUM_GPUS] = None,
    dataset: Annotated[str | None, _DATASET] = None,
    sequence_length: Annotated[int | None, _LENGTH] = None,
    method: Annotated[str | None, _METHOD] = None,
    lora_rank: Annotated[int | None, _RANK] = None,
    lora_targets: Annotated[str | None, _TARGETS] = None,
    epochs: Annotated[float | None, _EPOCHS] = None,
    num_queries: Annotated[int | None, _QUERIES] = None,
    micro_batch_size: Annotated[int | None, _BATCH] = None,
    gradient_accumulation_steps: Annotated[int | None, _ACCUMULATION] = None,
    gradient_checkpointing: Annotated[str | None, _CHECKPOINTING] = None,
    zero_stage: Annotated[int | None, _ZERO] = None,
    software: Annotated[str | None, _SOFTWARE] = None,
    calibration: Annotated[str | None, _COEFFICIENTS] = None,
    price: Annotated[str | None, _PRICE] = None,
    prices: Annotated[Path | None, _PRICES] = None,
    market: Annotated[str | None, _MARKET] = None,
    on_oom: Annotated[str | None, _ON_OOM] = None,
    field: Annotated[list[str] | None, _SET] = None,
    as_json: AsJson = False,
) -> None:
    """What a fine-tuning run needs, takes and costs.

    The job is a YAML file, options, or both; options win. The file may be a recipe of LLaMA-Factory, axolotl, TRL,
    torchtune or litgpt.

    \b
    moecost estimate --model mixtral-8x7b --gpu a40 --method qlora --dataset math-14k
    moecost estimate job.yaml --gpu h100 --set optimizer=adamw8bit --json
    """
    from moecost.estimation import estimate_job
    from moecost.job import Job
    from moecost.report import as_text

    given = {name: _typed(name, v) for name, v in ctx.params.items() if name in Job.model_fields and v is not None}
    given |= dict(assignment(text) for text in field or ())
    asked = Job(**given) if job is None else _job_of(job, given)
    found = estimate_job(asked if prices is None else _priced(asked, prices))
    _write((found.model_dump_json() if as_json else as_text(found, _width())) + "\n")
    if not found.fits:
        raise typer.Exit(DOES_NOT_FIT)


def _priced(job: Job, path: Path) -> Job:
    from moecost.cli_prices import priced

    job, notes, doubts = priced(job, path)
    for kind, texts in (("note", notes), ("warning", doubts)):
        for text in texts:
            _say(kind, text)
    return job


def _job_of(path: Path, given: Mapping[str, Any]) -> Job:
    """The job of a job file or of a training tool's recipe; what is given wins. Errors name the file."""
    try:
        return _of_file(path, given)
    except InvalidInputError as error:
        raise InvalidInputError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from None


def _of_file(path: Path, given: Mapping[str, Any]) -> Job:
    from moecost.catalog import read_yaml
    from moecost.job import Job, beside
    from moecost.recipes import RecipeWarning, recipe_tool

    content = read_yaml(path)
    if recipe_tool(content) is None:
        return Job(**beside(content, path) | dict(given))
    warnings.simplefilter("always", RecipeWarning)
    return Job.from_recipe(path, **given)


def _typed(name: str, value: Any) -> Any:
    """An option's text as the job takes it."""
    if name == "lora_targets":
        return [target.strip() for target in value.split(",") if target.strip()]
    return assignment(f"{name}={value}")[1] if name in ("price", "gradient_checkpointing") else value


def assignment(text: str) -> tuple[str, Any]:
    """Name and value of `field=value`; the value is YAML.

    >>> assignment("lora_targets=[w1, w2]"), assignment("compile=true"), assignment("price=0.79")
    (('lora_targets', ['w1', 'w2']), ('compile', True), ('price', 0.79))
    """
    from moecost.catalog import parse_yaml

    name, equals, value = text.partition("=")
    name = name.strip().replace("-", "_")
    if not equals or not name:
        raise InvalidInputError(f"--set {text!r}: write field=value, for example --set optimizer=adamw8bit")
    found = parse_yaml(f"value: {value}", f"--set {name}")
    if len(found) > 1:
        raise InvalidInputError(f"--set {name}: one value, not several lines")
    return name, found["value"]


# --------------------------------------------------------------------------------------------------------- sweep
_AXIS = typer.Option(
    "--axis", help="Values of a field, comma separated; may be repeated.", metavar="FIELD=V1,V2,...", show_default=False
)
_TABLE = typer.Option("--out", "-o", help="Write all rows here (.parquet, .csv).", metavar="FILE", show_default=False)


@app.command(no_args_is_help=True)
def sweep(
    job: Annotated[Path | None, _JOB_FILE] = None,
    axis: Annotated[list[str] | None, _AXIS] = None,
    field: Annotated[list[str] | None, _SET] = None,
    out: Annotated[Path | None, _TABLE] = None,
    as_json: AsJson = False,
) -> None:
    """All combinations of some values: how many fit, the cheapest and the fastest, and a table of all rows.

    What the job file says holds for every row; axes and --set win. Exit status 1 where no row fits. --json prints the
    axes, the counts and the best rows.

    \b
    moecost sweep job.yaml --axis micro_batch_size=1,2,4 --axis gpu=a40,h100 -o rows.parquet
    """
    from moecost import sweeping
    from moecost.sweep_axes import PLURAL
    from moecost.sweep_report import as_text

    if out is not None:
        _check_writable(out, (".parquet", ".csv"), "a table")
    axes = [axis_values(text) for text in axis or ()]
    if twice := [name for name, _ in axes if [other for other, _ in axes].count(name) > 1]:
        raise InvalidInputError(f"--axis {twice[0]} is given twice; write all its values in one: --axis {twice[0]}=1,2")
    given = dict(assignment(text) for text in field or ()) | dict(axes)
    of_job = {} if job is None else _fields_of_file(job, given)
    named = {name: plural for plural, name in PLURAL.items()}
    found = sweeping.sweep(**{named.get(name, name): value for name, value in (of_job | given).items()})
    if out is not None:
        (found.to_csv if out.suffix.lower() == ".csv" else found.to_parquet)(out)
    if as_json:
        _write_json(found.summary())
    else:
        _write(as_text(found, _width()) + "\n" + ("" if out is None else f"\nwritten: {out}\n"))
    if not found["fits"].any():
        raise typer.Exit(DOES_NOT_FIT)


def _fields_of_file(path: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that a job file or recipe says, those that are given apart."""
    from moecost.catalog import read_yaml
    from moecost.job import beside
    from moecost.recipes import recipe_tool

    content = read_yaml(path)
    if recipe_tool(content) is not None:
        first = {name: value[0] if isinstance(value, list) else value for name, value in given.items()}
        job = _of_file(path, first)
        content = {name: getattr(job, name) for name in job.model_fields_set}
    return {name: value for name, value in beside(content, path).items() if name not in given}


def axis_values(text: str) -> tuple[str, list[Any]]:
    """Name and values of `field=v1,v2`; each value is YAML, names of `lora_targets` in one value are divided by `;`.

    >>> axis_values("micro_batch_size=1,2,4"), axis_values("lora_targets=attention,w1;w2")
    (('micro_batch_size', [1, 2, 4]), ('lora_targets', [['attention'], ['w1', 'w2']]))
    """
    from moecost.catalog import parse_yaml

    name, equals, values = text.partition("=")
    name = name.strip().replace("-", "_")
    if not equals or not name or not values.strip():
        raise InvalidInputError(f"--axis {text!r:.80}: write field=value,value, for example --axis gpu=a40,h100")
    if name == "lora_targets":
        return name, [value.split(";") for value in values.split(",")]
    found = parse_yaml(f"value: [{values}]", f"--axis {name}")
    if len(found) > 1:
        raise InvalidInputError(f"--axis {name}: values with commas between them, not several lines")
    return name, found["value"]


# ---------------------------------------------------------------------------------------------------------- plan
_SUBJECT = typer.Argument(
    metavar="JOB.yaml|MODEL", help="A job file or recipe, or a model.", autocompletion=_names("models")
)
_BUDGET = _option("--budget", "Most dollars of the whole run.", metavar="NUMBER")
_DEADLINE = _option("--deadline", "Most hours from start to end.", metavar="NUMBER")
_TRIED = _option("--gpus", "GPUs to choose from; all with a quote.", _names("gpus"), "NAME,...")
_SELLERS = _option("--providers", "Whose quotes may be used; all.", metavar="NAME,...")
_METHODS = _option("--methods", "Methods to choose from; the job's, or all.", metavar="NAME,...")
_MARKETS = _option("--market", "on_demand, spot, reserved, or several.", _words("on_demand", "spot", "reserved"))
_HEADROOM = _option("--headroom", "Share of memory that stays free.", metavar="NUMBER")
_MOST = _option("--max-gpus", "Most GPUs of a run.", metavar="INTEGER")
_QUOTES = typer.Option("--prices", help="Price table to choose from.", metavar="FILE", show_default=False)
_GRID = _option("--grid-gco2-per-kwh", "Carbon intensity of the grid, for CO2e.", metavar="NUMBER")


@app.command(no_args_is_help=True)
def plan(
    subject: Annotated[str, _SUBJECT],
    dataset: Annotated[str | None, _DATASET] = None,
    budget: Annotated[float | None, _BUDGET] = None,
    deadline: Annotated[float | None, _DEADLINE] = None,
    gpus: Annotated[str | None, _TRIED] = None,
    providers: Annotated[str | None, _SELLERS] = None,
    methods: Annotated[str | None, _METHODS] = None,
    market: Annotated[str, _MARKETS] = "on_demand",
    headroom: Annotated[float | None, _HEADROOM] = None,
    max_gpus: Annotated[int | None, _MOST] = None,
    prices: Annotated[Path | None, _QUOTES] = None,
    grid: Annotated[float | None, _GRID] = None,
    field: Annotated[list[str] | None, _SET] = None,
    as_json: AsJson = False,
) -> None:
    """Which GPUs, how many, whose and how laid out, within a budget and a deadline.

    What a job file says of its GPUs, layout, batch a GPU and price is left open; its data, method and global batch
    hold. Exit status 1 where nothing keeps to the limits: what comes nearest is shown.

    \b
    moecost plan mixtral-8x7b --dataset math-14k --budget 50 --deadline 12 --methods qlora,lora
    moecost plan job.yaml --gpus a40,h100 --market on_demand,spot --set epochs=3 --json
    """
    from moecost import planning
    from moecost.cli_plan import fields_of, told
    from moecost.plan_report import as_text

    given = dict(assignment(text) for text in field or ()) | ({} if dataset is None else {"dataset": dataset})
    path = Path(subject)
    fields = fields_of(_job_of(path, {}), given) if path.is_file() else {"model": subject} | given
    limits = told(min_memory_headroom=headroom, max_gpus=max_gpus, grid_gco2_per_kwh=grid)
    found = planning.plan(
        budget_usd=budget,
        deadline_hours=deadline,
        gpus=_listed(gpus),
        providers=_listed(providers),
        methods=_listed(methods),
        market=_listed(market) or [],
        prices=None if prices is None else _price_table(prices),
        **limits,
        **fields,
    )
    _write((found.model_dump_json() if as_json else as_text(found, _width())) + "\n")
    if not found.front:
        raise typer.Exit(DOES_NOT_FIT)


def _listed(text: str | None) -> list[str] | None:
    """Names that commas divide."""
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def _price_table(path: Path) -> PriceBook:
    """The quotes of a file; what was left out of it is said on stderr."""
    from moecost.prices import read

    book = read(path)
    for text in book.dropped_notes():
        _say("warning", text)
    return book


# --------------------------------------------------------------------------------------------- compare and report
_JOB_FILES = typer.Argument(metavar="JOB.yaml...", help="Files with jobs, or recipes.", show_default=False)
_GPUS = typer.Option("--gpu", help="Each job on this GPU; may be repeated.", autocompletion=_names("gpus"),
                     metavar="TEXT", show_default=False)  # fmt: skip
_PAGE = typer.Option("--out", "-o", help="The page; else the job's name and .html.", metavar="FILE", show_default=False)


@app.command(no_args_is_help=True)
def compare(
    jobs: Annotated[list[Path], _JOB_FILES],
    gpu: Annotated[list[str] | None, _GPUS] = None,
    prices: Annotated[Path | None, _PRICES] = None,
    field: Annotated[list[str] | None, _SET] = None,
    as_json: AsJson = False,
) -> None:
    """Jobs beside each other, cheapest first; those that lost with the reason why.

    With --gpu, machine and price in a file hold for its own GPU alone; others have the catalogue's.

    \b
    moecost compare lora.yaml qlora.yaml
    moecost compare job.yaml --gpu a40 --gpu l40s --gpu h100 --set epochs=3
    """
    from moecost.comparing import compare
    from moecost.comparison_report import as_text

    given = dict(assignment(text) for text in field or ())
    labels: list[str] = []
    asked: list[Job] = []
    for path in jobs:
        name = path.stem if len({p.stem for p in jobs}) == len(jobs) else str(path)
        for on in gpu or (None,):
            one = _job_of(path, given if on is None else _moved(path, on) | given | {"gpu": on})
            asked.append(one if prices is None else _priced(one, prices))
            labels.append(name if on is None else on if len(jobs) == 1 else f"{name} on {on}")
    found = compare(asked, labels=labels)
    _write((found.model_dump_json() if as_json else as_text(found, _width())) + "\n")
    if not found.estimates:
        raise typer.Exit(DOES_NOT_FIT if any(c.estimate for c in found.candidates) else BAD_INPUT)
    if any(c.status == "cannot be used" for c in found.candidates):
        raise typer.Exit(BAD_INPUT)


def _moved(path: Path, gpu: str) -> dict[str, None]:
    """What a job's file says of its GPU, to be forgotten on another one."""
    from moecost.catalog import gpu_index, read_yaml

    own = str(read_yaml(path).get("gpu"))
    known = gpu_index().get(own)
    same = own == gpu or (known is not None and known == gpu_index().get(gpu))
    return {} if same else dict.fromkeys(("price", "node", "gpus_per_node"))


@app.command(no_args_is_help=True)
def report(
    job: Annotated[Path, _JOB_FILE],
    out: Annotated[Path | None, _PAGE] = None,
    field: Annotated[list[str] | None, _SET] = None,
    as_json: AsJson = False,
) -> None:
    """A report to hand around: one HTML file with figures, their sources and alternatives.

    \b
    moecost report job.yaml -o report.html
    """
    from moecost.estimation import estimate_job
    from moecost.page import write_report

    out = Path(f"{job.stem}.html") if out is None else out
    _check_writable(out, (".html", ".htm"), "a page")
    asked = _job_of(job, dict(assignment(text) for text in field or ()))
    found = estimate_job(asked.model_copy(update={"on_oom": "report"}))
    write_report(out, found, asked)
    _write((found.model_dump_json() if as_json else f"written: {out}") + "\n")
    if not found.fits:
        raise typer.Exit(DOES_NOT_FIT)


# ----------------------------------------------------------------------------------------------- measured runs
_RUNS = typer.Argument(metavar="RUNS", help="A CSV of runs, a log, or a folder of logs.", show_default=False)
_FIT_FILES = typer.Argument(
    metavar="FILE...",
    help="Runs (CSV, JSON, logs, folders of them), and YAML files of `moecost probe` to start from.",
    show_default=False,
)
_FIT_SOFTWARE = _option(
    "--software", "Fit for this stack, whatever the runs name; several stacks are fitted jointly.",
    _names("software_profiles"),
)  # fmt: skip
_OUT = typer.Option("--out", "-o", help="Write the calibration here (.yaml).", metavar="FILE", show_default=False)
_NAME = _option("--name", "Of the calibration; the name of the file.")
_CALIBRATION = _option("--calibration", "Name or file; that of each run's software.", _calibrations)
_PLOT = typer.Option("--plot", help="Draw predicted against measured here.", metavar="FILE", show_default=False)
_ROWS = typer.Option("--rows", help="Show so many of the worst rows.", metavar="N", min=0)
SHOWN_REFUSALS: Final = 3


@app.command(no_args_is_help=True)
def fit(
    paths: Annotated[list[Path], _FIT_FILES],
    software: Annotated[str | None, _FIT_SOFTWARE] = None,
    out: Annotated[Path | None, _OUT] = None,
    name: Annotated[str | None, _NAME] = None,
    as_json: AsJson = False,
) -> None:
    """Fit a calibration to measured runs, starting from what was probed on their machine where that is given.

    \b
    moecost fit my-runs.csv --software hf-peft -o mine.yaml
    moecost fit probe.yaml my-runs.csv run.moecost.json -o mine.yaml
    moecost estimate job.yaml --set calibration=mine.yaml
    """
    from moecost import fitting

    if out is not None:
        _check_writable(out, (".yaml", ".yml"))
    if twice := [path for path in paths if [other.absolute() for other in paths].count(path.absolute()) > 1]:
        raise InvalidInputError(f"{twice[0]}: is given twice, and would count twice; give each file once")
    probes = [path for path in paths if path.suffix.lower() in (".yaml", ".yml")]
    runs = [run for path in paths if path not in probes for run in _read_runs(path)]
    name = name or (out.stem if out is not None else None)
    stacks = {run.job.software for run in runs}
    if probes:
        found = fitting.fit_probed([fitting.load_probe(path) for path in probes], runs, software, name=name)
    elif software is None and len(stacks) > 1:
        found = fitting.fit_stacks(runs, name=name or "joint")
    else:
        found = fitting.fit(runs, software, name=name)
    if out is not None:
        found.save(out)
    _write(found.model_dump_json(indent=2) + "\n" if as_json else _fit_text(found, out, _width()))


def _read_runs(path: Path) -> Runs:
    """Runs of a file; what could not be read is said on stderr, and an error where nothing could."""
    from moecost.measurements import read

    runs = read(path, on_error="report")
    if not runs:
        raise InvalidInputError(runs.refused[0] if runs.refused else f"{path}: has no runs")
    for message in runs.refused[:SHOWN_REFUSALS]:
        _say("warning", f"left out: {message}")
    if len(runs.refused) > SHOWN_REFUSALS:
        _say("warning", f"left out: {len(runs.refused) - SHOWN_REFUSALS} more")
    return runs


def _check_writable(path: Path, suffixes: Sequence[str] = (), what: str = "a calibration") -> None:
    """Before the work is done, so that none is lost."""
    if suffixes and path.suffix.lower() not in suffixes:
        raise InvalidInputError(f"{path}: the name of {what}'s file must end in {' or '.join(suffixes)}")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise InvalidInputError(f"{path}: cannot be written: " + ("is a folder" if path.is_dir() else "no such folder"))


def _fit_text(c: Calibration, out: Path | None, width: int) -> str:
    import textwrap

    from moecost.report import percent, significant

    lines = [f"CALIBRATION {c.name}: fitted on {c.num_runs} runs, base {c.software}"]
    names = {name: c.coefficients[name] for name in sorted(c.coefficients, key=lambda n: not c.coefficients[n].fitted)}
    for name, found in names.items():
        head = f"  {name:<24}{found.value:>10.4g}  "
        why = f"fitted, spread {percent(found.log_sd)}" if found.fitted else f"held: {found.why or 'no reason given'}"
        lines += textwrap.wrap(why, width, initial_indent=head, subsequent_indent=" " * len(head))
    for name, factors in c.hardware_factors.items():
        lines += textwrap.wrap(f"{name} by hardware: {_factors(factors)}", width, initial_indent="  ",
                               subsequent_indent="    ", break_on_hyphens=False)  # fmt: skip
    if c.software_factors:
        lines += textwrap.wrap(f"time by stack: {_factors(c.software_factors)}", width, initial_indent="  ",
                               subsequent_indent="    ", break_on_hyphens=False)  # fmt: skip
    lines.append("ERRORS: mean |predicted / measured - 1|")
    if c.base_error is not None:
        lines.append(f"  {'before the fit':<24}{percent(c.base_error):>10}  with {c.base}")
    if c.in_sample_error is not None:
        lines.append(f"  {'in sample':<24}{percent(c.in_sample_error):>10}")
    if c.cross_validated_error is None:
        lines.append("  no runs could be left out: there is one group of them")
    else:
        head = f"  {'runs left out':<24}{percent(c.cross_validated_error):>10}  "
        lines += textwrap.wrap(c.cross_validated_by, width, initial_indent=head, subsequent_indent=" " * len(head))
    lines.append(f"  {'spread of a new run':<24}{percent(c.log_sd_time):>10}  of time")
    lines.append(f"  {'':<24}{percent(c.log_sd_memory):>10}  of memory")
    ranges = ", ".join(f"{k} {significant(a)} to {significant(b)}" for k, (a, b) in c.range.items())
    lines += textwrap.wrap(f"RANGE: {ranges}", width, subsequent_indent="  ")
    lines += textwrap.wrap("; ".join(c.notes), width, initial_indent="NOTES: ", subsequent_indent="  ")
    lines.append("not written; -o mine.yaml keeps it" if out is None else f"written: {out}")
    return "\n".join(lines) + "\n"


def _factors(factors: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in factors.items())


@app.command(no_args_is_help=True)
def validate(
    path: Annotated[Path, _RUNS],
    calibration: Annotated[str | None, _CALIBRATION] = None,
    plot: Annotated[Path | None, _PLOT] = None,
    rows: Annotated[int, _ROWS] = 5,
    as_json: AsJson = False,
) -> None:
    """Measured runs against what is predicted for them: error, bias, interval coverage.

    \b
    moecost validate my-runs.csv --calibration mine.yaml --plot runs.png
    """
    from moecost import validation

    if plot is not None:
        _check_writable(plot)
    report = validation.validate(_read_runs(path), calibration)
    if plot is not None:
        report.plot(plot)
    _write((report.to_json() if as_json else report.text(rows, _width())) + "\n")


# --------------------------------------------------------------------------------------------------------- probe
_DEVICE = _option("--device", "cuda or cpu; a GPU where there is one.", _words("cuda", "cpu"))
_PROBED_GPU = _option("--gpu", "The GPU's name or spec file, where its own is not known; `measured`: none.",
                      _names("gpus"))  # fmt: skip
_NODE = _option("--node", "Machine type, whose links join the GPUs.", _names("nodes"))
_EXCHANGING = _option("--num-gpus", "GPUs that exchange with each other; 1: no exchanges.", metavar="INTEGER")
_REPEATS = typer.Option(
    "--repeats", help="How often each piece of work is timed; 7.", metavar="N", min=1, show_default=False
)
_PROBE_OUT = typer.Option(
    "--out", "-o", help="The file; else probe-<device>.yaml, or <job>.moecost.json.", metavar="FILE", show_default=False
)
_FORCE = typer.Option("--force", help="Replace the file if there is one.")
_TRAIN = typer.Option("--train", help="Run a few steps of this job instead.", metavar="JOB.yaml", show_default=False)
_STEPS = typer.Option("--steps", help="Optimizer steps of --train; 20.", metavar="N", show_default=False)
_LAYERS = typer.Option("--layers", help="Depth of the model of --train; as many as fit.", metavar="N", min=1,
                       show_default=False)  # fmt: skip


@app.command()
def probe(
    device: Annotated[str | None, _DEVICE] = None,
    gpu: Annotated[str | None, _PROBED_GPU] = None,
    node: Annotated[str | None, _NODE] = None,
    num_gpus: Annotated[int | None, _EXCHANGING] = None,
    software: Annotated[str, _SOFTWARE] = "hf-peft",
    repeats: Annotated[int | None, _REPEATS] = None,
    train: Annotated[Path | None, _TRAIN] = None,
    steps: Annotated[int | None, _STEPS] = None,
    layers: Annotated[int | None, _LAYERS] = None,
    field: Annotated[list[str] | None, _SET] = None,
    out: Annotated[Path | None, _PROBE_OUT] = None,
    force: Annotated[bool, _FORCE] = False,
    as_json: AsJson = False,
) -> None:
    """Measure this machine (needs PyTorch): a calibration for it, or a short real run of a job.

    Ctrl-C ends it with what there is. A file of `moecost probe` is a calibration, and what `moecost fit` starts from.

    \b
    moecost probe -o mine.yaml
    moecost probe --train job.yaml --steps 20
    moecost fit mine.yaml job.moecost.json -o better.yaml
    """
    from moecost import cli_probe
    from moecost.probe.machine import this_machine
    from moecost.progress import counter

    def say(text: str) -> None:
        _say("warning", text)

    if train is not None:
        if node or num_gpus or repeats is not None:
            raise InvalidInputError("--node, --num-gpus and --repeats are not for --train, which runs on one GPU")
        given = dict(assignment(text) for text in field or ())
        return _probe_by_training(train, given, out, force, as_json, steps=20 if steps is None else steps,
                                  device=device, gpu=gpu, layers=layers)  # fmt: skip
    if field or layers or steps is not None:
        raise InvalidInputError("--set, --steps and --layers belong to --train; give it, or leave them out")
    out = out or cli_probe.default_name(this_machine(device, gpu, node).name)
    cli_probe.check_new_file(out, ".yaml", force)
    with counter() as show:
        found, written = cli_probe.run_probe(
            out, lambda done, total, task: show(done, total, task.kind), say,
            device=device, gpu=gpu, node=node, num_gpus=num_gpus, software=software,
            **({} if repeats is None else {"repeats": repeats}),
        )  # fmt: skip
    return _write_probed(found.model_dump_json(), cli_probe.probe_text(found, _width()), out, written, as_json)


def _probe_by_training(
    path: Path, given: Mapping[str, Any], out: Path | None, force: bool, as_json: bool, **how: Any
) -> None:
    from moecost import cli_probe
    from moecost.estimation import estimate_job
    from moecost.progress import counter
    from moecost.run_json import SUFFIX

    job = _job_of(path, given)
    out = out or cli_probe.default_run_name(path)
    cli_probe.check_new_file(out, SUFFIX, force)
    with counter() as show:
        done, written = cli_probe.run_training(
            job, out, lambda number, total, seconds: show(number, total, "steps"), lambda t: _say("warning", t), **how
        )
    assert done.run is not None
    text = cli_probe.training_text(done, estimate_job(done.job).step.seconds, _width())
    _write_probed(done.run.model_dump_json(), text, out, written, as_json)


def _write_probed(json: str, text: str, out: Path, written: bool, as_json: bool) -> None:
    """The result on stdout; where its file could not be written, all of it, so that nothing is lost."""
    if not written:
        _write(json + "\n")
        raise InvalidInputError(f"{out}: could not be written; what was measured is on the standard output as JSON")
    _write((json if as_json else f"{text}\nwritten: {out}") + "\n")


# ------------------------------------------------------------------------------------------------------ catalogues
@app.command()
def gpus(filter_: Filter = None, as_json: AsJson = False) -> None:
    """GPUs of the catalogue: memory, rates, and what they cost.

    GB is the memory on the label, GiB what a program gets (~: estimated), GB/s its bandwidth, TFLOP/s the dense peak
    in bf16, $/hour the median of the on-demand quotes for one GPU, then their number and dates.
    """
    from moecost import catalog
    from moecost.specs import GPUSpec

    index = catalog.gpu_index()
    names = _matching(filter_, index.names, index.other_names(), catalog.gpu_name)
    rows = [_gpu_row(GPUSpec.load(name)) for name in names]
    if as_json:
        return _write_json(rows)
    columns = ["GPU", "GB", "GiB", "GB/s", "TFLOP/s", "$/hour", "quotes", "dates"]
    return _write_table(columns, [_gpu_cells(row) for row in rows], right=range(1, 7))


def _gpu_row(gpu: GPUSpec) -> dict[str, Any]:
    from moecost import catalog
    from moecost.sources import UNDATED
    from moecost.units import GIB

    quotes = catalog.quotes(gpu, market="on_demand")
    dates = sorted(quote.date for quote in quotes if quote.date != UNDATED)
    return {
        "name": gpu.name,
        "marketing_name": gpu.marketing_name,
        "memory_label_gb": gpu.memory_label_gb,
        "memory_usable_gib": gpu.memory_usable_bytes / GIB,
        "memory_usable_is_estimated": gpu.memory_usable_gib is None,
        "bandwidth_gb_per_s": gpu.bandwidth_gb_per_s,
        "bf16_tflops_dense": gpu.peak_tflops_dense.get("bf16"),
        "median_usd_per_gpu_hour": catalog.median_quote(gpu).usd_per_gpu_hour if quotes else None,
        "num_quotes": len(quotes),
        "first_date": dates[0] if dates else None,
        "last_date": dates[-1] if dates else None,
    }


def _gpu_cells(row: Mapping[str, Any]) -> list[str]:
    bf16, usd = row["bf16_tflops_dense"], row["median_usd_per_gpu_hour"]
    return [
        row["name"],
        f"{row['memory_label_gb']:g}",
        f"{'~' * row['memory_usable_is_estimated']}{row['memory_usable_gib']:.1f}",
        f"{row['bandwidth_gb_per_s']:,.0f}",
        "none" if bf16 is None else f"{bf16:,.1f}",
        "none" if usd is None else f"{usd:,.2f}",
        f"{row['num_quotes']}",
        "..".join(dict.fromkeys(date[:7] for date in (row["first_date"], row["last_date"]) if date)),
    ]


_FILE = typer.Option("--file", help="A price table of yours, SkyPilot's or gpuhunt's; or a folder or zip of them.",
                     metavar="PATH", show_default=False)  # fmt: skip
_SELLER = _option("--provider", "Whose quotes; with --file also who asks, where the file does not say.")
_LIVE = typer.Option("--live", help="Ask gpuhunt for those of today, over the network.")
_DATE = _option("--date", "Of the file, where it has none.", metavar="DATE")
_CURRENCY = _option("--currency", "Of the file's prices, where it does not say.", metavar="CODE")
_USD_PER = typer.Option("--usd-per", help="Dollars for one of another currency; may be repeated.", metavar="CODE=USD")
_KEEP = typer.Option("--out", "-o", help="Write the quotes here (.csv).", metavar="FILE", show_default=False)


@app.command()
def prices(
    filter_: Filter = None,
    market: Annotated[str | None, _MARKET] = None,
    provider: Annotated[str | None, _SELLER] = None,
    file: Annotated[Path | None, _FILE] = None,
    live: Annotated[bool, _LIVE] = False,
    date: Annotated[str | None, _DATE] = None,
    currency: Annotated[str | None, _CURRENCY] = None,
    usd_per: Annotated[list[str] | None, _USD_PER] = None,
    out: Annotated[Path | None, _KEEP] = None,
    as_json: AsJson = False,
) -> None:
    """What a GPU-hour costs: low, median and high in dollars, by market and provider.

    n is the number of quotes, oldest the first of their dates. The quotes are those that ship with moecost, those of
    a file, or those of today. Rows of a file that give no quote are counted with the reason.

    \b
    moecost prices h100 --market spot
    moecost prices a100 --file ~/.sky/catalogs/v8
    moecost estimate job.yaml --prices quotes.csv
    """
    from moecost import catalog, cli_prices

    if out is not None:
        _check_writable(out)
    index = catalog.gpu_index()
    gpus = None if filter_ is None else _matching(filter_, index.names, index.other_names(), catalog.gpu_name)
    book = cli_prices.chosen_book(file, ask=live, gpus=gpus, market=market, provider=provider, date=date,
                                  currency=currency, usd_per=usd_per or ())  # fmt: skip
    for text in (*book.dropped_notes(), *book.age_notes()):
        _say("warning", text)
    if out is not None:
        book.save(out)
    if as_json:
        return _write_json([cli_prices.as_json(row) for row in book.ranges()])
    return _write_table(cli_prices.COLUMNS, [cli_prices.cells(row) for row in book.ranges()], cli_prices.NUMBERS)


@app.command()
def models(filter_: Filter = None, as_json: AsJson = False) -> None:
    """Models of the catalogue: parameters as counted and as published."""
    from moecost import catalog
    from moecost.architecture import ModelSpec

    index = catalog.model_index()
    hint = "moecost.models() lists all."
    names = _matching(filter_, index.names, index.other_names(), lambda name: index.find(name, hint))
    rows = [_model_row(ModelSpec.load(name)) for name in names]
    if as_json:
        return _write_json(rows)
    columns = ["model", "total", "active", "pub. total", "pub. active", "Hub id"]
    return _write_table(columns, [_model_cells(row) for row in rows], right=range(1, 5))


def _model_row(spec: ModelSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "num_parameters": spec.num_parameters,
        "num_active_parameters": spec.num_active_parameters,
        "published_parameters": spec.published_parameters,
        "published_active_parameters": spec.published_active_parameters,
        "hub_ids": list(spec.hub_ids),
    }


def _model_cells(row: Mapping[str, Any]) -> list[str]:
    from moecost.report import counted

    name, *counts, hub_ids = row.values()
    return [name, *("" if n is None else counted(n) for n in counts), next(iter(hub_ids), "")]


@app.command()
def software(as_json: AsJson = False) -> None:
    """Training stacks that are known, with their calibration."""
    from moecost.software import SoftwareProfile, software_profiles

    profiles = [SoftwareProfile.load(name) for name in software_profiles()]
    rows = [
        {"name": p.name, "experts": p.experts, "calibration": p.calibration, "description": p.description}
        for p in profiles
    ]
    if as_json:
        return _write_json(rows)
    return _write_table(["software", "experts", "calibration", "description"], [list(row.values()) for row in rows])


@app.command()
def datasets(as_json: AsJson = False) -> None:
    """Data sets that ship: queries, and their length in tokens."""
    from moecost.dataset_spec import DatasetSpec, dataset_names

    specs = [DatasetSpec.load(name) for name in dataset_names()]
    rows = [
        {
            "name": spec.name,
            "num_queries": spec.num_queries,
            "mean_length": spec.mean_length,
            "longest": spec.longest,
            "description": spec.description,
        }
        for spec in specs
    ]
    if as_json:
        return _write_json(rows)
    cells = [
        [spec.name, f"{spec.num_queries:,}", f"{spec.mean_length:.0f}", f"{spec.longest:,}", spec.description]
        for spec in specs
    ]
    return _write_table(["data set", "queries", "mean tokens", "longest", "description"], cells, right=range(1, 4))


@app.command()
def fields(
    filter_: Filter = None,
    results: Annotated[bool, typer.Option("--results", help="Those of an estimate.")] = False,
    as_json: AsJson = False,
) -> None:
    """Fields of a job, for options, --set and job files; or, with --results, of an estimate."""
    from moecost.field_docs import choices, field_docs
    from moecost.job import Job
    from moecost.results import Estimate

    of: type[Job | Estimate] = Estimate if results else Job
    docs = field_docs(of)
    rows = [
        {"name": name, "default": "" if field.is_required() else _plain(field.default),
         "choices": list(choices(field.annotation)), "description": docs.get(name, "")}
        for name, field in of.model_fields.items() if filter_ is None or filter_.lower() in name
    ]  # fmt: skip
    if not rows:
        raise InvalidInputError(f"no field has {filter_!r:.80} in its name; give less of it")
    if as_json:
        return _write_json(rows)
    cells = [[f"{row['name']}", f"{row['default']}", " ".join([f"{row['description']}", *_or(row)])] for row in rows]
    if results:
        return _write_table(["field", "meaning"], [[name, text] for name, _, text in cells])
    return _write_table(["field", "default", "meaning"], cells)


def _plain(default: Any) -> Any:
    return list(default) if isinstance(default, tuple) else default


def _or(row: Mapping[str, Any]) -> list[str]:
    """The values that a field can have, where they are few."""
    return [f"({', '.join(map(str, row['choices']))})"] if row["choices"] else []


def _matching(
    wanted: str | None, names: Sequence[str], others: Mapping[str, Sequence[str]], find: Callable[[str], str]
) -> list[str]:
    """Names of which `wanted` is a part, or of which an alias has it; else the one that `find` knows by it."""
    from moecost.catalog import normalise

    if wanted is None:
        return list(names)
    part = normalise(wanted)
    found = [name for name in names if any(part in normalise(known) for known in (name, *others.get(name, ())))]
    return found or [find(wanted)]


# --------------------------------------------------------------------------------------------------------- output
def _width() -> int:
    """Columns of a report."""
    import shutil

    from moecost.report import WIDTH

    return min(WIDTH, shutil.get_terminal_size().columns) if sys.stdout.isatty() else WIDTH


def _write_json(value: Any) -> None:
    import json

    _write(json.dumps(value, indent=2) + "\n")


def _write_table(columns: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int] = ()) -> None:
    """A table that fits the terminal, or with whole lines where the output is a pipe or file."""
    import io
    import shutil

    from rich.console import Console
    from rich.table import Table

    from moecost.report import printable

    piped = not sys.stdout.isatty()
    width = UNBOUNDED if piped else max(shutil.get_terminal_size().columns, NARROWEST)
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=not piped, markup=False, emoji=False, highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2 if width > NARROWEST else 1, 0, 0), header_style="bold")
    for i, name in enumerate(columns):
        side: Literal["left", "right"] = "right" if i in right else "left"
        last = i == len(columns) - 1  # alone in taking more than a line
        table.add_column(name, justify=side, overflow="fold" if last else "ellipsis", no_wrap=piped or not last)
    for row in rows:
        table.add_row(*map(printable, row))
    console.print(table)
    _write("".join(line.rstrip() + "\n" for line in out.getvalue().splitlines()))


def _write(text: str) -> None:
    """Text to stdout. A reader that went away (`| head`) is no error."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit finds a place to go
        if not isinstance(error, BrokenPipeError):
            raise InvalidInputError(f"the output cannot be written: {error.strerror}") from error


def _say(kind: str, what: object) -> None:
    from moecost.report import printable

    typer.echo(f"moecost: {kind}: {printable(str(what))}", err=True)
