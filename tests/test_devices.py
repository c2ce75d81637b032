"""The device table: complete, sourced, and found by name and by what is present."""

import dataclasses
import pickle

import pytest
import torch

from torch_evt import devices, workloads
from torch_evt.devices import DEVICES, default_target, device, device_of
from torch_evt.errors import TargetError
from torch_evt.report.explain import explain


@pytest.mark.parametrize("entry", DEVICES.values(), ids=list(DEVICES))
def test_every_figure_is_positive_and_has_a_source(entry: devices.Device) -> None:
    figures = {"memory_bandwidth", "l2_bytes", "launch_us", "peak_flops", "sustained"}
    assert figures <= set(entry.sources)
    assert set(entry.sources) <= {field.name for field in dataclasses.fields(entry)}
    assert min(entry.memory_bandwidth, entry.l2_bytes, entry.launch_us) > 0
    assert all(value > 0 for value in entry.peak_flops.values())
    assert set(entry.sustained) == {"memory", "flops"}
    assert all(0 < share <= 1 for share in entry.sustained.values())
    assert (entry.capability is None) == (entry.kind == "cpu")
    assert (entry.multiprocessors == 0) == (entry.kind == "cpu")
    if entry.kind == "cuda":
        assert {"product_names", "capability", "multiprocessors"} <= set(entry.sources)


def test_the_key_of_an_entry_is_its_name_and_product_names_are_unique() -> None:
    assert all(name == entry.name for name, entry in DEVICES.items())
    products = [product for entry in DEVICES.values() for product in entry.product_names]
    assert len(products) == len(set(products))


def test_h200_has_the_dense_datasheet_figures() -> None:
    h200 = device("h200")
    assert h200.capability == (9, 0)
    assert h200.memory_bandwidth == 4.8e12
    with_sparsity = {"tf32": 989e12, "bf16": 1979e12, "f16": 1979e12, "f8": 3958e12}
    assert {kind: 2 * h200.peak_flops[kind] for kind in with_sparsity} == with_sparsity


WITH_SPARSITY = {
    "h100": {"tf32": 989e12, "bf16": 1979e12, "f16": 1979e12, "f8": 3958e12},
    "h100-pcie": {"tf32": 756e12, "bf16": 1513e12, "f16": 1513e12, "f8": 3026e12},
    "a100": {"tf32": 312e12, "bf16": 624e12, "f16": 624e12},
    "a100-pcie": {"tf32": 312e12, "bf16": 624e12, "f16": 624e12},
    "a100-40gb": {"tf32": 312e12, "bf16": 624e12, "f16": 624e12},
    "l40s": {"tf32": 366e12, "bf16": 733e12, "f16": 733e12, "f8": 1466e12},
    "rtx4090": {"tf32": 165.2e12, "bf16": 330.4e12, "f16": 330.4e12, "f8": 660.6e12},
    "b200": {"tf32": 2200e12, "bf16": 4500e12, "f16": 4500e12, "f8": 9000e12},
}
"""flop/s as the datasheets print them, on matrices of which half the values are zero. That of the
L40S prints 362.05 beside 733."""


@pytest.mark.parametrize("name", WITH_SPARSITY)
def test_tensor_core_figures_are_half_of_those_with_sparsity(name: str) -> None:
    peak = device(name).peak_flops
    doubled = {kind: 2 * peak[kind] for kind in WITH_SPARSITY[name]}
    assert doubled == pytest.approx(WITH_SPARSITY[name], rel=0.013)
    assert set(peak) - set(WITH_SPARSITY[name]) == {"f64", "f32"}


def test_the_figures_of_every_gpu_are_held_against_its_datasheet() -> None:
    assert {entry.name for entry in DEVICES.values() if entry.kind == "cuda"} == {
        "h200",
        *WITH_SPARSITY,
    }


PRODUCTS = {
    "NVIDIA H200": ("h200", 4800, 132, 60),
    "NVIDIA H100 80GB HBM3": ("h100", 3350, 132, 50),
    "NVIDIA H100 PCIe": ("h100-pcie", 2000, 114, 50),
    "NVIDIA A100-SXM4-80GB": ("a100", 2039, 108, 40),
    "NVIDIA A100 80GB PCIe": ("a100-pcie", 1935, 108, 40),
    "NVIDIA A100-SXM4-40GB": ("a100-40gb", 1555, 108, 40),
    "NVIDIA A100-PCIE-40GB": ("a100-40gb", 1555, 108, 40),
    "NVIDIA L40S": ("l40s", 864, 142, 96),
    "NVIDIA GeForce RTX 4090": ("rtx4090", 1008, 128, 72),
    "NVIDIA B200": ("b200", 7700, 148, 126),
}
"""What a GPU calls itself -> its target, GB/s, multiprocessors, MiB of L2."""


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_gpu_is_recognised_by_its_name(monkeypatch: pytest.MonkeyPatch, product: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda where: product)
    target, bandwidth, multiprocessors, cache = PRODUCTS[product]
    assert default_target() == target
    entry = device(target)
    assert entry.memory_bandwidth == pytest.approx(bandwidth * 1e9)
    assert (entry.multiprocessors, entry.l2_bytes) == (multiprocessors, cache * 2**20)


def test_every_product_name_is_tested() -> None:
    assert set(PRODUCTS) == {name for entry in DEVICES.values() for name in entry.product_names}


@pytest.mark.parametrize(
    "product",
    ["NVIDIA GeForce RTX 4090 D", "NVIDIA A100 80GB PCIe MIG 1g.10gb", "NVIDIA A100-SXM-64GB"],
)
def test_a_gpu_with_other_figures_is_not_taken_for_its_namesake(
    monkeypatch: pytest.MonkeyPatch, product: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda where: product)
    assert device_of(torch.device("cuda", 0)) is None


@pytest.mark.gpu
def test_the_present_gpu_reports_what_the_table_says() -> None:
    where = torch.device("cuda", 0)
    entry = device_of(where)
    if entry is None:
        pytest.skip(f"{torch.cuda.get_device_name(where)} is not in the table")
    found = torch.cuda.get_device_properties(where)
    assert (found.major, found.minor) == entry.capability
    assert found.multi_processor_count == entry.multiprocessors
    assert found.L2_cache_size == pytest.approx(entry.l2_bytes, rel=0.01)


@pytest.mark.parametrize("name", DEVICES)
def test_a_model_is_planned_for_every_target(name: str) -> None:
    model, inputs, loss = workloads.get("mlp", "tiny").make()
    plan = explain(model, *inputs, loss=loss, options={"evt.target": name})
    assert plan.target == name
    (graph,) = plan.graphs
    assert graph.objective_us is not None and graph.objective_us > 0


def test_rates_are_the_sustained_share_of_the_peak_in_microseconds() -> None:
    h200 = device("h200")
    assert h200.bytes_per_us() == pytest.approx(4.26e6, rel=0.01)
    assert 637e6 < h200.flops_per_us(torch.bfloat16) < 755e6
    fp32 = h200.flops_per_us(torch.float32)
    assert h200.flops_per_us(torch.float32, tf32=True) > 5 * fp32
    assert h200.flops_per_us(torch.float8_e4m3fn) == 2 * h200.flops_per_us(torch.float16)
    assert h200.flops_per_us(torch.int8) == fp32


def test_a_device_without_tf32_prices_it_as_fp32() -> None:
    cpu = device("cpu")
    assert cpu.flops_per_us(torch.float32, tf32=True) == cpu.flops_per_us(torch.float32)


@pytest.mark.parametrize(("typed", "nearest"), [("H200", "h200"), ("h20", "h200"), ("cppu", "cpu")])
def test_an_unknown_target_names_the_nearest(typed: str, nearest: str) -> None:
    with pytest.raises(TargetError, match=f"did you mean '{nearest}'"):
        device(typed)


def test_entries_can_be_hashed_and_pickled() -> None:
    h200 = device("h200")
    assert len({h200, pickle.loads(pickle.dumps(h200)), device("cpu")}) == 2


def test_the_cpu_is_found() -> None:
    assert device_of(torch.device("cpu")) is DEVICES["cpu"]
    assert device_of(torch.device("meta")) is None


@pytest.mark.parametrize(
    ("product", "target"), [("NVIDIA H200", "h200"), ("NVIDIA GeForce GTX 980", "h200")]
)
def test_the_present_gpu_is_the_default_target_if_the_table_has_it(
    monkeypatch: pytest.MonkeyPatch, product: str, target: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda where: product)
    other = dataclasses.replace(device("cpu"), name="other", product_names=("NVIDIA Other",))
    monkeypatch.setattr(devices, "DEVICES", {**DEVICES, "other": other})
    assert default_target() == target
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda where: "NVIDIA Other")
    assert default_target() == "other"


def test_without_a_gpu_the_default_target_is_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert default_target() == "h200"
    assert device_of(torch.device("cuda", 0)) is None
