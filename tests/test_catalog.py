"""Reading spec files, from friends and strangers, and finding them by name."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from moecost import catalog, spec_files
from moecost.errors import InvalidInputError, MoECostError, UnknownNameError, UnsupportedError
from moecost.specs import GPUSpec, NodeSpec
from moecost.units import GB, GIB

MINE = """\
name: mine
marketing_name: My GPU
vendor: NVIDIA
architecture: Ampere
num_sms:            {value: 84, source: sheet, doubt: counted by hand}
memory_label_gb:    {value: 48, source: sheet}
bandwidth_gb_per_s: {value: 696, source: sheet, checked: [table]}
peak_tflops_dense:
  bf16: {value: 149.7, source: sheet}
notes: [A note.]
sources:
  sheet: {title: My sheet, date: 2026-01}
  table: {title: A table, date: undated}
"""


# -- names


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("a40", "a40"),
        ("A40", "a40"),
        ("NVIDIA A40", "a40"),
        (" nvidia  a40 ", "a40"),
        ("Tesla T4", "t4"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb-sxm"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb-sxm"),
        ("H100", "h100-80gb-sxm"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("rtx 4090", "rtx-4090"),
        ("RTX-PRO-6000", "rtx-pro-6000-server"),
        ("AMD Instinct MI300X", "mi300x"),
        ("p5.48xlarge", "h100-80gb-sxm"),
        ("g6e.48xlarge", "l40s"),
        ("p3.8xlarge", "v100-16gb-sxm2"),
        ("Standard_ND96isr_H100_v5", "h100-80gb-sxm"),
        ("A100-80GB", "a100-80gb-sxm"),
        ("A40-48GB", "a40"),
    ],
)
def test_names_of_a_gpu(name: str, key: str) -> None:
    assert GPUSpec.load(name).name == key


@pytest.mark.parametrize("name", ["H20", "H200", "L4", "L40", "L40S", "A10", "A10G", "A100", "B200", "GB200", "T4"])
def test_a_name_within_another_is_not_confused(name: str) -> None:
    assert GPUSpec.load(name).name.startswith(name.lower())
    assert name.lower() in GPUSpec.load(name).name.split("-")


@pytest.mark.parametrize("name", ["a4", "a401", "nvidia", "", "a40x", "h100-81gb", "../a40", "H10080GB"])
def test_a_miss(name: str) -> None:
    with pytest.raises(UnknownNameError):
        GPUSpec.load(name)


def test_a_miss_lists_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown GPU 'a4O'; did you mean .*'a40'") as caught:
        GPUSpec.load("a4O")
    assert "moecost.gpus()" in str(caught.value)
    with pytest.raises(UnknownNameError, match=r"unknown node 'dgx-h1000'; did you mean 'dgx-h100'"):
        NodeSpec.load("dgx-h1000")


def test_instances() -> None:
    found = catalog.instance("p5.48xlarge")
    assert found is not None
    assert found.node is not None
    assert (found.gpu, found.gpus_per_node, found.node.name) == ("h100-80gb-sxm", 8, "p5.48xlarge")
    assert catalog.instance("p3.8xlarge") == ("v100-16gb-sxm2", 4, None)  # only its price is known
    for gpu in ("h100", "NVIDIA A40", "t4", "rtx-pro-6000-server", "nothing"):
        assert catalog.instance(gpu) is None
    assert catalog.node_for_instance("NDSomething") is None


def test_node_units() -> None:
    """P5: 900 GB/s NVLink both ways, 3,200 Gb/s of network one way."""
    node = NodeSpec.load("p5.48xlarge")
    assert node.intra_bytes_per_s_per_gpu_one_way == 450 * GB
    assert node.inter_bytes_per_s_per_node_one_way == 3200e9 / 8
    assert node.inter_bytes_per_s_per_gpu_one_way == 50 * GB


def test_gpu_units() -> None:
    gpu = GPUSpec.load("a40")
    assert gpu.bandwidth_bytes_per_s == 696e9
    assert gpu.memory_usable_bytes == 44.42 * GIB
    assert gpu.memory_usable_note is None
    assert gpu.peak_flops_per_s("bf16") == 149.7e12
    assert GPUSpec.load("h100").peak_flops_per_s("fp8-blockwise") == 1978.9e12
    assert GPUSpec.load("b200").peak_flops_per_s("nvfp4") == GPUSpec.load("b200").peak_flops_per_s("fp4") == 9e15
    assert GPUSpec.load("b200").peak_flops_per_s("mxfp8") == 4.5e15


def test_memory_from_the_label() -> None:
    gpu = GPUSpec.load("rtx-a4000")
    assert gpu.memory_usable_gib is None
    assert 15 * GIB < gpu.memory_usable_bytes < 16 * GIB  # the card has 16 GiB and no ECC by default
    assert "median of NVIDIA parts" in str(gpu.memory_usable_note)
    assert "no part of its vendor" in str(GPUSpec.load("tpu-v4").memory_usable_note)


@pytest.mark.parametrize(
    ("gpu", "dtype", "message"),
    [
        ("t4", "bf16", r"NVIDIA T4 has no bf16 tensor rate \(Turing: bf16 .* fp16 65, int8 130. Choose fp16"),
        ("v100", "bf16", "Volta.*Choose fp16"),
        ("k80", "bf16", "Kepler.*Choose fp32"),
        ("a100", "fp8", "has no known fp8 rate; it has .*bf16 312"),
        ("h100", "mxfp8", "no block-scaled matrix rate.*Choose fp8 or fp8-blockwise"),
        ("h100", "nvfp4", "no known nvfp4 rate"),
    ],
)
def test_a_rate_it_lacks(gpu: str, dtype: str, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        GPUSpec.load(gpu).peak_flops_per_s(dtype)


def test_not_a_compute_type() -> None:
    with pytest.raises(InvalidInputError, match=r"compute_dtype='bf61' is not a compute type; did you mean bf16"):
        GPUSpec.load("a40").peak_flops_per_s("bf61")


# -- index


def folder_with(tmp_path: Path, **files: str) -> catalog.Index:
    for stem, text in files.items():
        (tmp_path / f"{stem}.yaml").write_text(text, encoding="utf-8")
    return catalog.Index(tmp_path, "thing")


def test_an_alias_in_two_files_names_both(tmp_path: Path) -> None:
    index = folder_with(tmp_path, one="name: one\naliases: [Same One]", two="name: two\naliases: [same-one]")
    assert index.get("one") == "one"
    with pytest.raises(InvalidInputError, match=r"'same-one' is claimed by two files: .*one\.yaml and .*two\.yaml"):
        index.get("same one")


def test_a_file_that_the_index_lacks_is_read(tmp_path: Path) -> None:
    index = folder_with(tmp_path, one="name: one\naliases: {value: [First], source: x}\nhub_ids: [org/One]")
    index.write_index()
    (tmp_path / "two.yaml").write_text("name: two\naliases: [Second]", encoding="utf-8")
    again = catalog.Index(tmp_path, "thing")
    assert [again.find(n) for n in ("FIRST", "org/one", "second", "two")] == ["one", "one", "two", "two"]


def test_a_look_up_reads_one_file() -> None:
    code = (
        "from moecost import spec_files\nread = []\nplain = spec_files.read_text\n"
        "spec_files.read_text = lambda path: read.append(str(path)) or plain(path)\n"
        "from moecost.specs import GPUSpec\n"
        "GPUSpec.load('a40')\nassert len(read) == 1, read\n"
        "GPUSpec.load('NVIDIA L4'), GPUSpec.load('l4')\nassert len(read) == 3, read\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_data_folder_that_is_missing() -> None:
    with pytest.raises(InvalidInputError, match="no_such_folder"):
        catalog.data_folder("no_such_folder")


# -- specs


def test_a_file_of_your_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(MINE, encoding="utf-8")
    gpu = GPUSpec.load(str(file))
    assert gpu == GPUSpec.load(file)
    assert (gpu.num_sms, gpu.peak_tflops_dense) == (84, {"bf16": 149.7})
    assert gpu.provenance["num_sms"].doubt == "counted by hand"
    assert gpu.provenance["peak_tflops_dense.bf16"].source == "sheet"
    assert gpu.provenance["bandwidth_gb_per_s"].checked == ("table",)
    assert gpu.sources["sheet"].date == "2026-01"
    assert gpu.notes == ("A note.", "num_sms: counted by hand")
    assert gpu.origin("vendor") is None


def test_a_source_covers_what_lies_inside_its_pair(tmp_path: Path) -> None:
    text = MINE.replace(
        "\n  bf16: {value: 149.7, source: sheet}", " {value: {bf16: 149.7, fp16: 149.7}, source: sheet}"
    )
    gpu = catalog.validate(catalog.parse_yaml(text), GPUSpec, "text")
    origin = gpu.origin("peak_tflops_dense.fp16")
    assert origin is not None
    assert origin.source == "sheet"


def test_specs_are_frozen_and_travel() -> None:
    gpu = GPUSpec.load("a40")
    with pytest.raises(ValidationError, match="frozen"):
        gpu.num_sms = 1
    with pytest.raises(TypeError, match="frozen spec"):
        gpu.peak_tflops_dense["bf16"] = 1.0  # type: ignore[index]
    assert pickle.loads(pickle.dumps(gpu)) == gpu == copy.deepcopy(gpu)
    assert GPUSpec.model_validate(gpu.model_dump()) == gpu
    assert GPUSpec.model_validate_json(gpu.model_dump_json()) == gpu
    assert len({gpu, copy.deepcopy(gpu)}) == 1
    assert "num_sms" in GPUSpec.model_json_schema()["properties"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("value: 84,", "value: -3,", r"num_sms: input should be greater than 0 \(it is -3\)"),
        ("value: 84,", "value: many,", r"num_sms: input should be a valid integer \(it is 'many'\)"),
        ("value: 84,", "value: 84.5,", "num_sms"),
        ("value: 84,", "value: true,", "num_sms"),
        ("value: 84,", "value: '84',", "num_sms"),
        ("value: 696,", "value: .inf,", "bandwidth_gb_per_s"),
        ("value: 696,", "value: 1e999,", "bandwidth_gb_per_s"),
        ("value: 696,", "value: .nan,", "bandwidth_gb_per_s"),
        ("value: 696,", "value: [1],", "bandwidth_gb_per_s"),
        ("value: 696,", "valu: 696,", "bandwidth_gb_per_s"),
        ("num_sms: ", "num_sm: ", "num_sm is not a field; did you mean num_sms"),
        ("vendor: NVIDIA\n", "", "vendor is missing"),
        ("name: mine", "name: ''", "name: "),
        ("name: mine", "name: [mine]", r"name: .*\(it is \('mine',\)\)"),
        ("  bf16:", "  bf17:", "peak_tflops_dense.bf17"),
        ("{value: 48, source: sheet}", "48", "memory_label_gb: 48 has no source; write {value: 48, source: <id>}"),
        ("{value: 48, source: sheet}", "{value: 48}", "memory_label_gb: .* has no 'source'"),
        ("{value: 48, source: sheet}", "{source: sheet}", "memory_label_gb: .* has no 'value'"),
        (
            "{value: 48, source: sheet}",
            "{value: 48, source: tale}",
            "names the source 'tale', which is not under sources",
        ),
        (", checked: [table]", "", "the source 'table' is used by no value"),
        ("date: 2026-01", "date: soon", r"sources.sheet.date: .*\(it is 'soon'\)"),
        ("date: 2026-01", "date: 2026-13", "sources.sheet.date"),
        (", date: 2026-01", "", "sources.sheet.date is missing"),
        ("notes: [A note.]", "notes: A note.", "notes: "),
        ("notes: [A note.]", "provenance: 3", "provenance: "),
    ],
)
def test_a_wrong_field_is_named_with_its_file_and_value(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in MINE
    file = tmp_path / "mine.yaml"
    file.write_text(MINE.replace(old, new), encoding="utf-8")
    with pytest.raises(InvalidInputError, match=message) as caught:
        GPUSpec.load(file)
    assert str(caught.value).startswith(str(file))
    assert "\n" not in str(caught.value)


def test_all_wrong_fields_in_one_message() -> None:
    data = catalog.parse_yaml(MINE.replace("value: 84,", "value: -3,").replace("vendor: NVIDIA\n", ""))
    with pytest.raises(InvalidInputError, match=r"vendor is missing; num_sms: .*"):
        catalog.validate(data, GPUSpec, "text")


# -- files from strangers

BOMB = "a: &a [x, x]\n" + "".join(
    f"{c}: &{c} [*{p}, *{p}, *{p}]\n" for p, c in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("# nothing\n", "is empty"),
        ("---\n", "is empty"),
        ("- 1\n- 2", "must hold fields"),
        ("just text", "must hold fields"),
        ("a: 1\na: 2", r"line 2: the key 'a' occurs twice"),
        ("x: {b: 1, b: 1}", r"line 1: the key 'b' occurs twice"),
        (BOMB, "line 1: anchors and aliases are not allowed"),
        ("a: *b", "anchors and aliases are not allowed"),
        ("a: 1\nb: !!python/object/apply:os.system [echo hi]", r"line 2: the tag .*os\.system' is not allowed"),
        ("!!python/object:moecost.specs.GPUSpec {}", "tag"),
        ("a: !!set {x}", "tag"),
        ("? {a: 1}\n: 2", "a key must be text"),
        ("? [a]\n: 2", "a key must be text"),
        ("a: " + "[" * 1000 + "]" * 1000, "levels deep|nesting depth"),
        ("a: " + "[" * 100_000, "levels deep|nesting depth"),
        ("{a: " * 50_000, "levels deep|nesting depth"),
        ("".join("  " * i + f"k{i}:\n" for i in range(100)), "levels deep"),
        ("a: [1, 2", "is not valid YAML"),
        ("a: 1\n---\nb: 2", "a second document"),
        ("a: " + "9" * 5000, "too many digits"),
        ("a: \x01", "is not valid YAML"),
        ("a: b: c", "is not valid YAML"),
        ("\tx: 1", "is not valid YAML"),
    ],
)
def test_refused_text(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_bytes(text.encode())
    start = time.perf_counter()
    with pytest.raises(InvalidInputError, match=message) as caught:
        catalog.read_yaml(file)
    assert str(caught.value).startswith(str(file))
    assert time.perf_counter() - start < 2


def test_refused_files(tmp_path: Path) -> None:
    huge = tmp_path / "huge.yaml"
    huge.write_bytes(b"a: " + b"x" * catalog.MAX_FILE_BYTES)
    with pytest.raises(InvalidInputError, match="larger than 2,000,000 bytes"):
        GPUSpec.load(huge)
    latin = tmp_path / "latin.yaml"
    latin.write_bytes("name: Größe".encode("latin-1"))
    with pytest.raises(InvalidInputError, match="not UTF-8"):
        GPUSpec.load(latin)
    with pytest.raises(InvalidInputError, match="No such file"):
        GPUSpec.load(tmp_path / "absent.yaml")
    with pytest.raises(InvalidInputError, match="cannot be read"):
        GPUSpec.load("a\0b.yaml")
    with pytest.raises(InvalidInputError, match="is not a file"):
        GPUSpec.load(tmp_path)
    with pytest.raises(InvalidInputError, match="is not a file"):
        GPUSpec.load(Path("/dev/zero"))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes")
def test_a_pipe_does_not_hang_us(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(InvalidInputError, match="is not a file"):
        GPUSpec.load(tmp_path / "pipe.yaml")


def test_plain_values() -> None:
    """As YAML 1.2, and without the surprises of 1.1."""
    text = "{a: 1e9, b: no, c: 12:30, d: 2025-01-02, e: null, f: true, g: -3, "
    assert catalog.parse_yaml(text + "h: '4', i: 0.5, j: 1_000, k: [], l: ~, m: 010}") == {
        "a": 1e9, "b": "no", "c": "12:30", "d": "2025-01-02", "e": None, "f": True, "g": -3,
        "h": "4", "i": 0.5, "j": "1_000", "k": [], "l": None, "m": 10,
    }  # fmt: skip


def test_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_bytes(b"\xef\xbb\xbf" + MINE.encode())
    assert GPUSpec.load(tmp_path / "mine.yaml").name == "mine"


def test_without_the_c_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = catalog.parse_yaml(MINE)
    monkeypatch.setattr(spec_files, "_YAML_LOADER", yaml.SafeLoader)
    assert catalog.parse_yaml(MINE) == fast
    for bad in (BOMB, "a: !!python/name:os.system ''", "a: 1\na: 2", "a: " + "[" * 1000, "a: \x01", "a: [1"):
        with pytest.raises(InvalidInputError):
            catalog.parse_yaml(bad)


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def result_or_error(make: Callable[[], Any], error_type: type[MoECostError] = MoECostError) -> Any:
    """What `make` returns, or the message of one of our errors; any other error fails the test."""
    try:
        return make()
    except error_type as error:
        return str(error) or None


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=200) | st.text("{}[]:,-?&*!|>'\"%@`#\n abc1.~<=", max_size=80))
def test_any_text_is_data_or_one_error(text: str) -> None:
    assert isinstance(result_or_error(lambda: catalog.parse_yaml(text)), dict | str)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([*GPUSpec.model_fields, "value", "sources", "colour"]), plain)
def test_any_value_of_any_field_is_a_spec_or_one_error(field: str, value: Any) -> None:
    data = {**catalog.parse_yaml(MINE), field: value}
    found = result_or_error(lambda: catalog.validate(data, GPUSpec, "text"))
    assert isinstance(found, GPUSpec) or found.startswith("text: ")


@settings(max_examples=100, deadline=None)
@given(st.integers(0, len(MINE)), st.integers(0, 30), st.text(max_size=10))
def test_a_damaged_file_is_a_spec_or_one_error(at: int, length: int, instead: str) -> None:
    text = MINE[:at] + instead + MINE[at + length :]
    found = result_or_error(lambda: catalog.validate(catalog.parse_yaml(text), GPUSpec, "text"))
    assert isinstance(found, GPUSpec | str)


@settings(max_examples=100, deadline=None)
@given(plain.filter(lambda v: isinstance(v, dict) and v))
def test_what_others_write_we_read(data: dict[str, Any]) -> None:
    """Text of PyYAML's own writer reads back with the keys that PyYAML reads, or is refused."""
    text = yaml.safe_dump(data, allow_unicode=True)
    found = result_or_error(lambda: catalog.parse_yaml(text))
    assert isinstance(found, str) or found.keys() == yaml.safe_load(text).keys()


@given(st.text(max_size=30))
def test_any_name_is_a_gpu_or_an_error(name: str) -> None:
    found = result_or_error(lambda: catalog.gpu_name(name), UnknownNameError)
    assert found in catalog.gpus() or found.startswith("unknown GPU")
