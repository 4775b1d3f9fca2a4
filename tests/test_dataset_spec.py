"""Data sets: what ships, what reads, and that a bad file gives one error that names file, line and value."""

from __future__ import annotations

import contextlib
import csv
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

import moecost.dataset_spec as module
from moecost.dataset_spec import DatasetSpec, dataset_names
from moecost.errors import InvalidInputError, UnknownNameError

PAPER = Path(__file__).parent / "data" / "paper"


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "aliases", "label", "queries"),
    [("commonsense-15k", ("commonsense_15k", "cs", "CS"), "cs", 15119), ("math-14k", ("math_14k",), "math", 13921)],
)
def test_built_in_sets_hold_the_published_histograms(
    name: str, aliases: tuple[str, ...], label: str, queries: int
) -> None:
    spec = DatasetSpec.load(name)
    assert (spec.name, spec.num_queries) == (name, queries)
    assert all(DatasetSpec.load(alias) is spec for alias in aliases)
    with (PAPER / f"seq_length_histogram_{label}.csv").open() as stream:
        rows = [tuple(map(int, row)) for row in list(csv.reader(stream))[1:]]
    assert list(zip(spec.histogram.lengths, spec.histogram.counts, strict=True)) == [row for row in rows if row[1]]
    assert spec.origin("histogram.counts") is not None
    assert DatasetSpec.load(PAPER / f"seq_length_histogram_{label}.csv").histogram.counts == spec.histogram.counts


def test_names() -> None:
    assert dataset_names() == ("commonsense-15k", "math-14k")
    with pytest.raises(UnknownNameError, match=r"did you mean 'math-14k'.*\.jsonl"):
        DatasetSpec.load("math14")
    for nothing in ("", " ", 5, None):
        with pytest.raises(InvalidInputError, match="give a name"):
            DatasetSpec.load(nothing)  # type: ignore[arg-type]


def test_round_trip_and_cache() -> None:
    spec = DatasetSpec.load("math-14k")
    assert DatasetSpec.model_validate_json(spec.model_dump_json()) == spec
    assert spec.lengths() is spec.lengths()
    assert spec.longest == 1470
    assert spec.mean_length == pytest.approx(187.2622, abs=1e-4)
    smaller = spec.model_copy(update={"num_queries": 1000})
    assert smaller.lengths().num_queries == pytest.approx(1000)
    assert smaller.mean_length == pytest.approx(spec.mean_length)
    with pytest.raises(ValidationError):
        spec.name = "other"


def test_from_numbers() -> None:
    assert DatasetSpec.from_lengths([3, 3, 5]).histogram.counts == (2, 1)
    assert DatasetSpec.fixed(512, 1000).lengths().num_queries == 1000
    assert DatasetSpec.fixed(512, 1000).longest == 512


GOOD = {
    "a.jsonl": "10\n20\n20\n",
    "b.jsonl": '{"length": 10}\n{"num_tokens": 20, "text": "x"}\n{"tokens": 20.0}',
    "c.jsonl": '{"input_ids": [1,2,3,4,5,6,7,8,9,0]}\n{"tokens": [1,2,3,4,5,6,7,8,9,0,1,2,3,4,5,6,7,8,9,0]}\n20',
    "d.txt": "10\r\n20\r\n20",
    "e.csv": "10\n20\n20\n",
    "f.csv": "anything\n10\n20.0\n 20\n",
    "g.csv": 'text,num_tokens\n"a, b\nc",10\nx,20\ny,20\n',
    "h.csv": "\ufeffLength,Count\n20,2\n10,1\n30,0\n",
    "i.csv": "seq_len_tokens,query_count\n20,2\n10,1\n",
    "j.yaml": "name: mine\nhistogram: {lengths: [10, 20], counts: [1, 2]}\n",
}


@pytest.mark.parametrize("name", GOOD)
def test_what_reads(tmp_path: Path, name: str) -> None:
    spec = DatasetSpec.load(str(write(tmp_path, name, GOOD[name])))
    assert spec.histogram.lengths == (10, 20)
    assert spec.histogram.counts == (1, 2)
    assert spec.num_queries == 3
    assert spec.name == ("mine" if name == "j.yaml" else name[0])


BAD = {
    "empty.jsonl": ("", "empty"),
    "blank.jsonl": ("10\n\n20\n", "line 2: blank"),
    "text.jsonl": ("10\nten\n", "line 2: 'ten' is not JSON"),
    "quoted.jsonl": ('10\n"20"\n', "line 2: '20' is not a whole number"),
    "negative.jsonl": ("-4\n", "line 1: -4 is not a whole number of tokens from 1"),
    "zero.jsonl": ("10\n0\n", "line 2: 0 is not"),
    "half.jsonl": ("10.5\n", "line 1: 10.5 is not"),
    "nan.jsonl": ("10\nNaN\n", "line 2: nan is not"),
    "huge.jsonl": ("100000001\n", "line 1: 100000001 is not a whole number of tokens from 1 to 100,000,000"),
    "infinite.jsonl": ("1e999\n", "line 1: inf is not"),
    "digits.jsonl": ("9" * 5000 + "\n", "line 1"),
    "deep.jsonl": ("[" * 100_000 + "\n", "line 1"),
    "true.jsonl": ("true\n", "line 1: True is not"),
    "null.jsonl": ('{"length": null}\n', "line 1, length: None is not"),
    "fields.jsonl": ('{"text": "x"}\n', "line 1: an object with 'text'; it needs one of length"),
    "no-tokens.jsonl": ('{"input_ids": []}\n', "line 1, input_ids: 0 is not"),
    "list.jsonl": ("[10, 20]\n", "line 1"),
    "empty.csv": ("", "empty"),
    "header.csv": ("length\n", "a header and nothing beneath"),
    "blank.csv": ("length\n10\n\n20\n", "line 3: blank"),
    "blank-cell.csv": ("text,length\nx,10\ny,\n", "line 3: a blank is not"),
    "text.csv": ("length\n10\nten\n", "line 3: 'ten' is not"),
    "negative.csv": ("-10\n", "line 1: -10.0 is not"),
    "zero.csv": ("length\n0\n", "line 2: 0.0 is not"),
    "nan.csv": ("length\nnan\n", "line 2: nan is not"),
    "huge.csv": ("length\n1e12\n", "line 2: 1000000000000.0 is not"),
    "columns.csv": ("a,b\n1,2\n", "none of them length"),
    "headless.csv": ("10,2\n20,3\n", "2 columns and no header"),
    "ragged.csv": ("length,count\n10,1,4\n", "line 2: 3 cells, the header has 2"),
    "count.csv": ("length,count\n10,-1\n", "line 2: -1.0 is not a whole number of queries from 0"),
    "no-queries.csv": ("length,count\n10,0\n", "all counts are 0"),
    "wide.csv": ("text,length\n" + "x" * 200_000 + ",10\n", "line 2: not readable as CSV"),
    "syntax.yaml": ("name: [", "line 2: is not valid YAML"),
    "list.yaml": ("- 1\n", "must hold fields"),
    "field.yaml": (
        "name: x\nhistogram: {lengths: [1], counts: [1]}\nqueries: 3\n",
        "queries is not a field; did you mean num_queries",
    ),
    "counts.yaml": ("name: x\nhistogram: {lengths: [1, 2], counts: [1]}\n", "2 lengths and 1 counts"),
    "zero.yaml": ("name: x\nhistogram: {lengths: [0], counts: [1]}\n", r"histogram\.lengths\.0: .* \(it is 0\)"),
    "many.yaml": (
        f"name: x\nhistogram: {{lengths: {[0] * 1000}, counts: [1]}}\n",
        r"\.\.\. \(a data set file has name",
    ),
    "text.yaml": ("name: x\nhistogram: {lengths: [1], counts: [many]}\n", r"histogram.counts.0: .*'many'"),
    "source.yaml": (
        "name: x\nhistogram: {lengths: [1], counts: [1]}\nnum_queries: {value: 3, source: y}\n",
        "source 'y'",
    ),
    "data.parquet": ("PAR1", "cannot tell what is in it"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_gives_one_error_that_names_file_line_and_value(tmp_path: Path, name: str) -> None:
    text, message = BAD[name]
    with pytest.raises(InvalidInputError, match=message) as caught:
        DatasetSpec.load(write(tmp_path, name, text))
    assert name in str(caught.value)
    assert len(str(caught.value)) < 600
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInputError, match="no such file"):
        DatasetSpec.load(tmp_path / "missing.csv")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(InvalidInputError, match="no such file"):
        DatasetSpec.load(tmp_path / "folder.csv")
    for name in ("latin.csv", "latin.jsonl", "latin.yaml"):
        (tmp_path / name).write_bytes(b"l\xe4nge\n10\n")
        with pytest.raises(InvalidInputError, match=r"latin.*(UTF-8|YAML)"):
            DatasetSpec.load(tmp_path / name)
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 5.0)
    with pytest.raises(InvalidInputError, match="give a histogram"):
        DatasetSpec.load(write(tmp_path, "large.csv", "10\n20\n30\n"))


@given(st.lists(st.integers(1, 10**8), min_size=1, max_size=20), st.sampled_from([".jsonl", ".csv", ".txt"]))
def test_reading_returns_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], suffix: str
) -> None:
    path = write(tmp_path_factory.mktemp("lengths"), f"x{suffix}", "".join(f"{length}\n" for length in lengths))
    assert DatasetSpec.load(path).histogram == DatasetSpec.from_lengths(lengths).histogram


@given(st.text(max_size=40), st.sampled_from([".jsonl", ".csv", ".txt", ".yaml"]))
def test_any_text_reads_or_gives_our_error(tmp_path_factory: pytest.TempPathFactory, text: str, suffix: str) -> None:
    path = tmp_path_factory.mktemp("text") / f"x{suffix}"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with contextlib.suppress(InvalidInputError):
        assert DatasetSpec.load(path).num_queries >= 1
