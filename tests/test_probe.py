"""What a probe makes of timings: on a machine whose law is known, and of whatever goes wrong on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from moecost import Calibration, GPUSpec, Job, MeasuredRun, NodeSpec, estimate
from moecost.cli import app
from moecost.communication import transfer_s
from moecost.errors import FitError, InvalidInputError
from moecost.fitting import fit, fit_probed
from moecost.probe import implied_by
from moecost.probe.machine import Machine, measured_peaks
from moecost.probe.tasks import (
    CannotMeasureError,
    Task,
    Timed,
    collective_tasks,
    single_tasks,
    task,
    time_tasks,
    timing,
)
from moecost.roofline import gemm_compute_time
from moecost.run_json import write_runs
from moecost.software import SoftwareProfile

pytestmark = pytest.mark.filterwarnings("ignore::moecost.errors.OutOfRangeWarning")

H100 = Machine(
    "cuda", "h100-80gb-sxm", "NVIDIA H100 80GB HBM3", 8, "550.54", GPUSpec.load("h100-80gb-sxm"),
    NodeSpec.load("p5.48xlarge"),
)  # fmt: skip
A40_BOX = Machine("cuda", "a40", "NVIDIA A40", 4, "550.54", GPUSpec.load("a40"), None)
TRUTH = {
    "gemm_efficiency": 0.71, "gemm_bandwidth": 0.83, "elementwise_bandwidth": 0.88, "attention_efficiency": 0.55,
    "dequantize_bandwidth": 0.33, "optimizer_bandwidth": 0.74, "launch_s": 5.2e-6, "link_share": 0.79,
    "pcie_share": 0.22,
}  # fmt: skip
LATENCY_S = {"allreduce": 40e-6, "allgather": 25e-6, "alltoall": 60e-6}


class LawfulClock:
    """A machine that keeps to the roofline, with 2 % of noise; its laws are written down anew here."""

    def __init__(self, machine: Machine, noise: float = 0.02, repeats: int = 7) -> None:
        assert machine.spec is not None
        self.spec, self.machine, self.noise, self.repeats = machine.spec, machine, noise, repeats
        self.random = np.random.default_rng(8)

    def measure(self, one: Task) -> Sequence[float]:
        return list(self.law(one) * np.exp(self.random.normal(0.0, self.noise, self.repeats)))

    def law(self, one: Task) -> float:
        t, width = TRUTH, {"bf16": 2, "fp16": 2, "fp32": 4}[one.dtype]
        bytes_per_s = self.spec.bandwidth_gb_per_s * 1e9
        peak = self.spec.peak_tflops_dense[one.dtype] * 1e12  # type: ignore[index]
        if one.kind == "gemm":
            m, k, n = (float(one[name]) for name in ("rows", "in_features", "out_features"))
            assert self.spec.num_sms is not None
            compute = gemm_compute_time(
                rows=m, in_features=k, out_features=n, num_sms=self.spec.num_sms,
                flops_per_s=peak * t["gemm_efficiency"],
            )  # fmt: skip
            return max(float(compute), width * (m * k + k * n + m * n) / (bytes_per_s * t["gemm_bandwidth"]))
        if one.kind in ("copy", "add"):
            arrays = {"copy": 2, "add": 3}[one.kind]
            return arrays * width * one["elements"] / (bytes_per_s * t["elementwise_bandwidth"])
        if one.kind == "launch":
            return 0.4 * t["launch_s"]  # without the Python around it
        if one.kind == "linear":  # 2 launches forward, 4 backward: `hf-peft`
            return one["layers"] * (2 if one.how == "forward" else 6) * t["launch_s"]
        if one.kind == "dequantize":  # 4 bits and an fp32 constant a block of 64 in, 16 bits out
            return one["elements"] * (0.5 + 4 / 64 + 2) / (bytes_per_s * t["dequantize_bandwidth"])
        if one.kind == "optimizer":  # 23 reads and writes of 4 bytes, and 6 us a tensor: `hf-peft`
            return one["elements"] * 23 * 4 / (bytes_per_s * t["optimizer_bandwidth"]) + 6e-6
        if one.kind == "attention":  # QK^T and PV over the causal half; backward 2.5 times that
            pairs = one["batch"] * one["heads"] * one["length"] ** 2 / 2
            forward = 4 * pairs * one["head_dim"] / (peak * t["attention_efficiency"])
            return forward * (1 if one.how == "forward" else 3.5)
        if one.kind in LATENCY_S:
            return self.exchange(one)
        return 1e-3  # mixtures: nothing is fitted to them

    def exchange(self, one: Task) -> float:
        n, node, spec = one["num_gpus"], self.machine.node, self.spec
        if node is None:
            assert spec.pcie_gb_per_s_bidirectional is not None
            rate = spec.pcie_gb_per_s_bidirectional / 2 * 1e9 * TRUTH["pcie_share"]
        else:
            assert node.intra_gb_per_s_per_gpu_bidirectional is not None
            rate = node.intra_gb_per_s_per_gpu_bidirectional / 2 * 1e9 * TRUTH["link_share"]
        sent = one["bytes"] * (n - 1) / n * (2 if one.kind == "allreduce" else 1)
        return LATENCY_S[one.kind] + float(transfer_s(sent_bytes=sent, bytes_per_s=rate, ramp_s=26e-6))


def probed(machine: Machine, noise: float = 0.02) -> Calibration:
    tasks = [*single_tasks("full", machine.dtypes), *collective_tasks("full", "bf16", machine.num_devices)]
    return implied_by(machine, time_tasks(tasks, LawfulClock(machine, noise)), SoftwareProfile.load("hf-peft"))


@pytest.mark.parametrize(("machine", "link", "other"), [(H100, "link_share", "pcie_share"),
                                                        (A40_BOX, "pcie_share", "link_share")])  # fmt: skip
def test_coefficients_of_a_known_machine_are_recovered(machine: Machine, link: str, other: str) -> None:
    found, base = probed(machine), Calibration.load("public-2026")
    values = found.values(machine.architecture)
    for name in set(TRUTH) - {other}:
        assert getattr(values, name) == pytest.approx(TRUTH[name], rel=0.05), name
        assert 0 < found.coefficients[name].log_sd < 0.25
        assert found.coefficients[name].why.startswith(f"probed on {machine.device_name}")
    assert found.coefficients[other] == base.coefficients[other]
    assert found.coefficients["router_skew"] == base.coefficients["router_skew"]
    assert found.probe is not None
    errors = [abs(t.predicted / t.seconds - 1) for t in found.probe.timings
              if t.predicted and t.kind not in ("launch", "eager", "grouped") and t.dtype != "fp32"]  # fmt: skip
    assert len(errors) > 30
    assert np.median(errors) < 0.03
    assert link in found.coefficients


def test_what_was_probed_replaces_the_factors_of_other_devices() -> None:
    """An H100's products in bf16 are as probed; those in fp8 keep their ratio to them."""
    found, base = probed(H100, noise=0.0), Calibration.load("public-2026")
    factors = base.hardware_factors["gemm_efficiency"]
    assert found.values("Hopper", None, "bf16").gemm_efficiency == pytest.approx(TRUTH["gemm_efficiency"], rel=1e-3)
    ratio = factors["Hopper fp8"] / factors["Hopper"]
    assert found.values("Hopper", None, "fp8").gemm_efficiency == pytest.approx(
        TRUTH["gemm_efficiency"] * ratio, rel=1e-3
    )


def test_a_probe_is_a_calibration_and_comes_back_from_its_file(tmp_path: Path) -> None:
    found = probed(A40_BOX)
    found.save(tmp_path / "mine.yaml")
    mine = Calibration.load(tmp_path / "mine.yaml")
    assert mine == found
    job = {"model": "mistral-7b", "method": "lora", "sequence_length": 1024, "micro_batch_size": 2}
    e = estimate(**job, gpu="a40", calibration=tmp_path / "mine.yaml")
    assert e.step.seconds != estimate(**job, gpu="a40").step.seconds
    assert e.log_sd_time == pytest.approx(estimate(**job, gpu="a40").log_sd_time)  # no run was seen
    other = estimate(**job, gpu="l40s", calibration=mine)
    assert any("was probed on a40, not on l40s" in note for note in other.notes)


@pytest.mark.parametrize("device", ["cpu", "NVIDIA Homemade 9000"])
def test_shares_of_measured_rates_serve_no_gpu_of_the_catalogue(device: str) -> None:
    machine = replace(A40_BOX, device="cpu" if device == "cpu" else "cuda", name=device, device_name=device, spec=None)
    timings = time_tasks(single_tasks("small", ("bf16",)), LawfulClock(A40_BOX))
    found = implied_by(machine, timings, SoftwareProfile.load("hf-peft"))
    assert found.probe is not None
    assert found.probe.peaks_of == "measured"
    with pytest.raises(InvalidInputError, match=f"calibration 'probe-{device}.*' cannot be used: it was probed on "):
        estimate("mistral-7b", "a40", method="lora", sequence_length=512, calibration=found)


def test_measured_peaks_are_the_highest_rates() -> None:
    """By hand: 2 x 1e9 multiply-adds in 1 ms, 2 x 1e6 x 4 bytes in 10 us, and 1.5 x 1e6 bytes sent by each of four."""
    done = [
        timing(task("gemm", "fp32", rows=1000, in_features=1000, out_features=1000), [1e-3]),
        timing(task("gemm", "fp32", rows=1000, in_features=1000, out_features=100), [1e-3]),
        timing(task("copy", "fp32", elements=10**6), [1e-5]),
        timing(task("allreduce", "fp32", bytes=10**6, num_gpus=4), [1e-4]),
    ]
    peaks = measured_peaks(done)
    assert peaks.flops_per_s == {"fp32": pytest.approx(2e12)}
    assert peaks.bytes_per_s == pytest.approx(8e11)
    assert peaks.link_bytes_per_s == pytest.approx(1.5e10)


def test_medians_and_spreads() -> None:
    found = timing(task("launch", "bf16", elements=1), [4.0, 1.0, 2.0, 3.0, 5.0])
    assert (found.seconds, found.spread, found.repeats) == (3.0, pytest.approx(2 / 3), 5)
    for bad in ([], [0.0], [float("nan")], [-1.0]):
        with pytest.raises(CannotMeasureError, match="are no times"):
            timing(task("launch", "bf16", elements=1), bad)


class Ending(LawfulClock):
    """Is interrupted at its nth task; its memory holds no large arrays."""

    left = 12

    def measure(self, one: Task) -> Sequence[float]:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        if one.kind in ("copy", "add") and one["elements"] == 2**28:
            raise CannotMeasureError("the device ran out of memory")
        return super().measure(one)


def test_ctrl_c_ends_with_what_there_is() -> None:
    kept = []
    timed = time_tasks(single_tasks("full", ("bf16",)), Ending(A40_BOX), keep=kept.append)
    assert not timed.complete
    assert [t.kind for t in timed.timings] == ["gemm"] * 8 + ["copy", "add"]
    assert timed.left_out == tuple(
        f"{kind} bf16 elements=268,435,456 left out: the device ran out of memory" for kind in ("copy", "add")
    )
    assert [len(so_far.timings) for so_far in kept] == [8, 9, 10]
    found = implied_by(A40_BOX, timed, SoftwareProfile.load("hf-peft"))
    assert found.probe is not None
    assert not found.probe.complete
    assert found.values().elementwise_bandwidth == pytest.approx(TRUTH["elementwise_bandwidth"], rel=0.05)
    base = Calibration.load("public-2026")
    assert found.coefficients["launch_s"] == base.coefficients["launch_s"]  # was not timed


def test_nothing_timed_implies_nothing() -> None:
    found = implied_by(A40_BOX, time_tasks([], LawfulClock(A40_BOX)), SoftwareProfile.load("hf-peft"))
    assert found.coefficients == Calibration.load("public-2026").coefficients


def test_timings_that_contradict_each_other_are_not_taken() -> None:
    """Copies at rates ten times apart tell no bandwidth."""
    done = [timing(task("copy", "bf16", elements=n), [n * 4 / rate]) for n, rate in ((10**8, 5e11), (10**8, 5e10))]
    found = implied_by(A40_BOX, Timed(tuple(done)), SoftwareProfile.load("hf-peft"))
    assert found.probe is not None
    assert any("elementwise_bandwidth is not taken from the probe" in note for note in found.probe.notes)
    base = Calibration.load("public-2026")
    assert found.coefficients["elementwise_bandwidth"] == base.coefficients["elementwise_bandwidth"]


def test_a_busy_machine_s_rates_are_not_taken() -> None:
    """Copies that agree with each other, at a hundredth of what a GPU's memory can do."""
    rate = A40_BOX.spec.bandwidth_gb_per_s * 1e9 / 100  # type: ignore[union-attr]
    done = [timing(task("copy", "bf16", elements=n), [n * 4 / rate] * 3) for n in (10**8, 2 * 10**8, 4 * 10**8)]
    found = implied_by(A40_BOX, Timed(tuple(done)), SoftwareProfile.load("hf-peft"))
    assert found.probe is not None
    assert any("was measured" in note and "was the machine busy?" in note for note in found.probe.notes)
    base = Calibration.load("public-2026")
    assert found.coefficients["elementwise_bandwidth"] == base.coefficients["elementwise_bandwidth"]


# -------------------------------------------------------------------------------------------------------- learning
def slow_run(times: float, **changes: Any) -> MeasuredRun:
    """A run on a machine with the coefficients of `TRUTH` and a stack that takes `times` as long."""
    job = Job(model="mistral-7b", gpu="a40", method="lora", sequence_length=1024, micro_batch_size=2)
    job = job.model_copy(update=changes)
    known = job.model_copy(update={"calibration": probed(A40_BOX, 0.0), "on_oom": "report"})
    seconds = estimate(known).step.seconds
    return MeasuredRun(job=job, step_seconds=times * seconds, group=f"{job.sequence_length}")


SHORT = {"sequence_length": 64, "micro_batch_size": 1}
LONG = {"sequence_length": 8192, "micro_batch_size": 1}
MIXTURE = {"model": "qwen1.5-moe-a2.7b", "sequence_length": 512, "micro_batch_size": 1}
FOUR_BITS = {"method": "qlora", "sequence_length": 128, "micro_batch_size": 1}


@pytest.mark.parametrize("changes", [SHORT, LONG, MIXTURE, FOUR_BITS], ids=["short", "long", "mixture", "4-bit"])
def test_a_probe_and_one_run_meet_runs_of_other_kinds(changes: dict[str, Any]) -> None:
    """A run tells how slow a stack is, a probe what its machine is good at: kinds of work that no run was seen of."""
    probe, one, other = probed(A40_BOX), slow_run(1.25), slow_run(1.25, **changes)

    def error(calibration: Calibration | None) -> float:
        found = estimate(other.job.model_copy(update={"calibration": calibration, "on_oom": "report"})).step.seconds
        return abs(found / other.step_seconds - 1)  # type: ignore[operator]

    learnt = fit_probed([probe], [one])
    assert error(probe) == pytest.approx(0.2, abs=0.03)  # the stack's own share of the time
    assert error(learnt) < 0.05
    assert error(fit([one])) > 2 * error(learnt)
    assert learnt.probe == probe.probe
    assert (learnt.base, learnt.num_runs) == (probe.name, 1)


def test_several_probes_are_one() -> None:
    first, second = probed(A40_BOX), probed(A40_BOX, 0.0)
    both = fit_probed([first, second], name="mine")
    assert both.name == "mine"
    for name in ("gemm_efficiency", "launch_s"):
        values = sorted(one.coefficients[name].value for one in (first, second))
        assert values[0] <= both.coefficients[name].value <= values[1]
    with pytest.raises(FitError, match="of several devices"):
        fit_probed([first, probed(H100)])
    with pytest.raises(FitError, match="at least one calibration that `moecost probe` made"):
        fit_probed([Calibration.load("public-2026")])
    with pytest.raises(FitError, match="the probe is of h100-80gb-sxm, a run of a40"):
        fit_probed([probed(H100)], [slow_run(1.0)])


def test_fit_takes_probes_and_runs_together(tmp_path: Path) -> None:
    """On the command line as in the library."""
    probed(A40_BOX).model_copy(update={"name": "box"}).save(tmp_path / "box.yaml")
    write_runs(tmp_path / "one.moecost.json", [slow_run(1.25)])
    out = tmp_path / "mine.yaml"
    files = [str(tmp_path / name) for name in ("box.yaml", "one.moecost.json")]
    result = CliRunner().invoke(app, ["fit", *files, "-o", str(out)])
    assert result.exit_code == 0, result.output
    mine, same = Calibration.load(out), fit_probed([probed(A40_BOX)], [slow_run(1.25)])
    assert mine.software_factors == same.software_factors
    assert (mine.base, mine.num_runs, mine.probe) == ("box", 1, Calibration.load(tmp_path / "box.yaml").probe)
    assert "before the fit" in result.output
    status = CliRunner().invoke(app, ["fit", str(out.with_name("box.yaml")), "-o", str(tmp_path / "alone.yaml")])
    assert status.exit_code == 0, status.output
    Calibration.load("public-2026").save(tmp_path / "other.yaml")
    refused = CliRunner().invoke(app, ["fit", str(tmp_path / "other.yaml"), files[1]])
    assert refused.exit_code == 2
    assert "is a calibration, but no probe" in refused.output
    again = CliRunner().invoke(app, ["fit", str(out), files[1]])
    assert again.exit_code == 2
    assert "was fitted to runs from box already" in again.output
    twice = CliRunner().invoke(app, ["fit", *files, files[1]])
    assert twice.exit_code == 2
    assert "one.moecost.json: is given twice" in twice.output
