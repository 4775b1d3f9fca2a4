"""What a probe makes of timings: on a machine whose law is known, and of whatever goes wrong on the way."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from moecost import Calibration, GPUSpec, NodeSpec
from moecost.communication import transfer_s
from moecost.probe import implied_by
from moecost.probe.machine import Machine
from moecost.probe.tasks import Task, collective_tasks, single_tasks, time_tasks
from moecost.roofline import gemm_compute_time
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

    def measure(self, task: Task) -> Sequence[float]:
        return list(self.law(task) * np.exp(self.random.normal(0.0, self.noise, self.repeats)))

    def law(self, task: Task) -> float:
        t, width = TRUTH, {"bf16": 2, "fp16": 2, "fp32": 4}[task.dtype]
        bytes_per_s = self.spec.bandwidth_gb_per_s * 1e9
        peak = self.spec.peak_tflops_dense[task.dtype] * 1e12  # type: ignore[index]
        if task.kind == "gemm":
            m, k, n = (float(task[name]) for name in ("rows", "in_features", "out_features"))
            assert self.spec.num_sms is not None
            compute = gemm_compute_time(
                rows=m, in_features=k, out_features=n, num_sms=self.spec.num_sms,
                flops_per_s=peak * t["gemm_efficiency"],
            )  # fmt: skip
            return max(float(compute), width * (m * k + k * n + m * n) / (bytes_per_s * t["gemm_bandwidth"]))
        if task.kind in ("copy", "add"):
            arrays = {"copy": 2, "add": 3}[task.kind]
            return arrays * width * task["elements"] / (bytes_per_s * t["elementwise_bandwidth"])
        if task.kind == "launch":
            return 0.4 * t["launch_s"]  # without the Python around it
        if task.kind == "linear":  # 2 launches forward, 4 backward: `hf-peft`
            return task["layers"] * (2 if task.how == "forward" else 6) * t["launch_s"]
        if task.kind == "dequantize":  # 4 bits and an fp32 constant a block of 64 in, 16 bits out
            return task["elements"] * (0.5 + 4 / 64 + 2) / (bytes_per_s * t["dequantize_bandwidth"])
        if task.kind == "optimizer":  # 23 reads and writes of 4 bytes, and 6 us a tensor: `hf-peft`
            return task["elements"] * 23 * 4 / (bytes_per_s * t["optimizer_bandwidth"]) + 6e-6
        if task.kind == "attention":  # QK^T and PV over the causal half; backward 2.5 times that
            pairs = task["batch"] * task["heads"] * task["length"] ** 2 / 2
            forward = 4 * pairs * task["head_dim"] / (peak * t["attention_efficiency"])
            return forward * (1 if task.how == "forward" else 3.5)
        if task.kind in LATENCY_S:
            return self.exchange(task)
        return 1e-3  # mixtures: nothing is fitted to them

    def exchange(self, task: Task) -> float:
        n, node, spec = task["num_gpus"], self.machine.node, self.spec
        if node is None:
            assert spec.pcie_gb_per_s_bidirectional is not None
            rate = spec.pcie_gb_per_s_bidirectional / 2 * 1e9 * TRUTH["pcie_share"]
        else:
            assert node.intra_gb_per_s_per_gpu_bidirectional is not None
            rate = node.intra_gb_per_s_per_gpu_bidirectional / 2 * 1e9 * TRUTH["link_share"]
        sent = task["bytes"] * (n - 1) / n * (2 if task.kind == "allreduce" else 1)
        return LATENCY_S[task.kind] + float(transfer_s(sent_bytes=sent, bytes_per_s=rate, ramp_s=26e-6))


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
        assert 0 < found.coefficients[name].log_sd < 0.15
        assert found.coefficients[name].why.startswith(f"probed on {machine.device_name}")
    assert found.coefficients[other] == base.coefficients[other]
    assert found.coefficients["router_skew"] == base.coefficients["router_skew"]
    assert found.probe is not None
    errors = [abs(t.predicted / t.seconds - 1) for t in found.probe.timings
              if t.predicted and t.kind not in ("launch", "eager", "grouped") and t.dtype != "fp32"]  # fmt: skip
    assert len(errors) > 30
    assert np.median(errors) < 0.03
    assert link in found.coefficients
