"""TFLOP/s and shares of the devices' peaks, of numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch

from embodied_rl.monitoring.work import Flops, Work, main_type, peak_of, perf_metrics

TERA = 1e12


def test_two_workers_of_one_phase() -> None:
    work = [
        Work(flops=Flops(model=30 * TERA, again=10 * TERA), peak=100 * TERA),
        Work(flops=Flops(model=50 * TERA), peak=300 * TERA),
    ]
    # 80 TFLOP in 2 s, of 400 TFLOP/s; 90 with what was computed twice.
    assert perf_metrics("update", work, 2.0) == {
        "perf/update_tflops": 40.0,
        "perf/update_mfu": pytest.approx(0.1),
        "perf/update_hfu": pytest.approx(0.1125),
    }


def test_what_is_not_known_is_left_out() -> None:
    known = Work(flops=Flops(model=TERA), peak=10 * TERA)
    assert perf_metrics("rollout", [known, Work(flops=Flops(model=TERA), peak=None)], 1.0) == {
        "perf/rollout_tflops": 2.0
    }
    assert perf_metrics("rollout", [known, None], 1.0) == {}
    assert perf_metrics("rollout", [], 1.0) == {}
    assert perf_metrics("rollout", [known], 0.0) == {}


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.5),
        ("NVIDIA H100 PCIe", torch.float16, 756.5),
        ("NVIDIA A100-SXM4-80GB", torch.float32, 19.5),
        ("NVIDIA H100 80GB HBM3", torch.float64, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", torch.bfloat16, None),
    ],
)
def test_peaks(monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype, peak: float | None) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert peak_of("cuda:0", dtype) == (None if peak is None else peak * TERA)


def test_a_processor_and_tensorfloat_have_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak_of("cpu", torch.float32) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert peak_of("cuda:1", torch.float32) is None
        assert peak_of("cuda:1", torch.bfloat16) == 989.5 * TERA
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def test_main_type() -> None:
    tensors = [torch.zeros(3), torch.zeros(4, dtype=torch.bfloat16), torch.zeros(9, dtype=torch.int64)]
    assert main_type(tensors) == torch.bfloat16
    assert main_type([]) == torch.float32
