"""The device table: complete, sourced, and found by name and by what is present."""

import dataclasses
import pickle

import pytest
import torch

from torch_evt import devices
from torch_evt.devices import DEVICES, default_target, device, device_of
from torch_evt.errors import TargetError


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
