from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from accel_state import device_kinds, libraries, runtime
from accel_state import devices as affinity
from accel_state import devices as probes
from accel_state import devices as select
from accel_state.device_kinds import BY_NAME, CPU, KINDS, DeviceKind, available_kind, kind_of
from accel_state.errors import MissingDependencyError, SettingsError
from accel_state.labels import DistributedType, RNGType
from accel_state.settings.run import DEVICE_TYPES


class FakeNamespace:
    def __init__(self, count: int, current: int | None = None) -> None:
        self.count, self.current, self.set = count, current, []

    def device_count(self) -> int:
        return self.count

    def is_initialized(self) -> bool:
        return self.current is not None

    def current_device(self) -> int:
        assert self.current is not None
        return self.current

    def set_device(self, device: torch.device) -> None:
        self.set.append(device)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch):
    def make(count: int, current: int | None = None) -> FakeNamespace:
        namespace = FakeNamespace(count, current)
        monkeypatch.setattr(torch, "cuda", namespace)
        monkeypatch.setattr(DeviceKind, "probe", lambda kind: True)
        return namespace

    return make


def test_every_family_of_the_issue_has_a_row_in_probe_order():
    assert [kind.name for kind in KINDS] == [
        "npu", "cuda", "rocm", "xpu", "mps", "mlu", "musa", "sdaa", "hpu", "neuron", "xla", "cpu",
    ]  # fmt: skip


def test_every_row_speaks_of_things_that_exist():
    for kind in KINDS:
        assert isinstance(kind.distributed_type, DistributedType)
        assert kind.rng_key is None or kind.rng_key in RNGType


def test_every_label_of_several_devices_belongs_to_a_family():
    labels = {kind.distributed_type for kind in KINDS}
    assert {label for label in DistributedType if label.value.startswith("MULTI_")} <= labels


def test_a_row_is_the_same_after_pickling():
    assert all(pickle.loads(pickle.dumps(kind)) == kind for kind in KINDS)


def test_the_table_is_read_without_torch():
    code = "import sys, accel_state.device_kinds as k; print(len(k.KINDS), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(len(KINDS)), "False"]


def test_the_settings_offer_every_family():
    families = ["CPU", "GPU", "NPU", "MLU", "SDAA", "MUSA", "XPU", "HPU", "NEURON"]  # as the page lists them
    assert ("NO", *(f"MULTI_{family}" for family in families)) == DEVICE_TYPES


def test_a_family_on_this_machine_is_found_with_its_own_device():
    kind = available_kind()
    assert kind.probe()
    assert torch.zeros(1, device=kind.type).device.type == kind.type


def test_the_first_family_that_answers_is_taken(monkeypatch):
    monkeypatch.setattr(DeviceKind, "probe", lambda kind: kind.name in {"xpu", "xla", "cpu"})
    assert available_kind().name == "xpu"


def test_a_plugin_that_is_not_installed_is_no_device():
    assert not dataclasses.replace(BY_NAME["npu"], plugin="surely_not_installed.torch").probe()


def test_a_device_of_an_unknown_type_is_named():
    with pytest.raises(ValueError, match="'meta'"):
        kind_of(torch.device("meta"))


def test_a_group_moves_tensors_of_the_cpu_beside_those_of_the_device():
    assert BY_NAME["cuda"].group_backend == "cpu:gloo,cuda:nccl"
    assert CPU.group_backend == "gloo"
    assert BY_NAME["mps"].group_backend is None


@given(count=st.integers(2, 8), data=st.data())
def test_every_process_of_a_machine_gets_a_device_of_its_own(count, data):
    rank = data.draw(st.integers(0, count - 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "cuda", FakeNamespace(count))
        assert select.default_device(BY_NAME["cuda"], rank, count) == torch.device("cuda", rank)


def test_more_processes_than_devices_is_an_error_that_names_the_variable(gpus):
    gpus(2)
    with pytest.raises(SettingsError, match=r"local rank 2 .* shows 2 cuda devices \(CUDA_VISIBLE_DEVICES"):
        select.default_device(BY_NAME["cuda"], 2, 3)


def test_a_process_that_sees_one_device_uses_it_whatever_its_local_rank(gpus):
    gpus(1)
    assert select.default_device(BY_NAME["cuda"], 3, 4) == torch.device("cuda", 0)


@pytest.mark.parametrize("device_type", ["privateuseone", "cpu"])
def test_an_accelerator_that_no_family_has_is_chosen_if_torch_can_use_it(monkeypatch, device_type):
    monkeypatch.setattr(device_kinds, "KINDS", (CPU,))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(device_type))
    kind, device = select.choose_device(None, cpu=False, local_rank=0, local_world_size=1)
    assert kind.type == device.type == device_type
    assert kind.name == kind_of(device).name
    assert (kind is CPU) == (device_type == "cpu")


@pytest.mark.parametrize(
    ("name", "installed", "warned"),
    [
        ("cuda", "2.10.0", True),
        ("cuda", "2.11.0+cu130", False),
        ("xpu", "2.9.1", True),
        ("mps", "2.9.1", False),
    ],
)
def test_a_torch_that_is_too_old_for_a_device_is_named_once(monkeypatch, caplog, name, installed, warned):
    monkeypatch.setattr(libraries, "installed_version", lambda _: Version(installed))
    monkeypatch.setattr(select, "available_kind", lambda: BY_NAME[name])
    monkeypatch.setattr(torch, name, FakeNamespace(1))
    select._warn_of_old_torch.cache_clear()
    for _ in range(2):
        assert select.choose_device(None, cpu=False, local_rank=0, local_world_size=1)[0].name == name
    select._warn_of_old_torch.cache_clear()
    assert ["torch>=2.11" in message for message in caplog.messages] == [True] * warned


def test_the_device_that_the_user_made_current_is_kept(gpus):
    gpus(4, current=2)
    assert select.default_device(BY_NAME["cuda"], 0, 1) == torch.device("cuda", 2)


def test_one_of_several_processes_gets_the_device_of_its_local_rank_whatever_is_current(gpus):
    gpus(4, current=1)
    devices = [select.default_device(BY_NAME["cuda"], rank, 2) for rank in range(2)]
    assert devices == [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert select.choose_device("cuda", cpu=False, local_rank=0, local_world_size=2)[1] == devices[0]


def test_asking_for_a_device_does_not_initialise_it(gpus):
    gpus(4)
    assert select.default_device(BY_NAME["cuda"], 0, 1) == torch.device("cuda", 0)


def test_a_device_can_be_asked_for_by_name(monkeypatch):
    monkeypatch.setattr(torch, "xpu", FakeNamespace(4))
    monkeypatch.setattr(DeviceKind, "probe", lambda kind: True)
    kind, device = select.choose_device("xpu:3", cpu=False, local_rank=1, local_world_size=2)
    assert (kind.name, device) == ("xpu", torch.device("xpu", 3))
    assert select.choose_device("xpu", cpu=False, local_rank=1, local_world_size=2)[1] == torch.device(
        "xpu", 1
    )


def test_the_cpu_wins_over_a_name():
    assert select.choose_device("cuda:1", cpu=True, local_rank=0, local_world_size=1) == (
        CPU,
        torch.device("cpu"),
    )


@pytest.mark.parametrize("name", ["gpu", "meta", "cuda:x"])
def test_a_name_that_is_no_device_is_an_error(name):
    with pytest.raises(SettingsError, match=f"ACCELERATE_TORCH_DEVICE='{name}'"):
        select.choose_device(name, cpu=False, local_rank=0, local_world_size=1)


def test_the_chosen_device_is_made_current(gpus):
    namespace = gpus(2)
    select.set_current_device(torch.device("cuda", 1))
    assert namespace.set == [torch.device("cuda", 1)]
    select.set_current_device(torch.device("cpu"))
    assert namespace.set == [torch.device("cuda", 1)]


def test_the_cpu_computes_in_bfloat16():
    x = torch.ones(2, 2, dtype=torch.bfloat16)
    assert (x @ x)[0, 0] == 2
    assert probes.is_bf16_available(device=torch.device("cpu"))


def test_bfloat16_on_an_apple_gpu_needs_macos_14(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: False)
    assert not probes.is_bf16_available(device=torch.device("mps"))


def test_tpus_can_be_left_out_of_the_question():
    assert probes.is_bf16_available(device=torch.device("xla"))
    assert not probes.is_bf16_available(ignore_tpu=True, device=torch.device("xla"))


def test_the_current_device_type_and_its_label_belong_together():
    device_type, label = probes.get_current_device_type()
    assert label == kind_of(torch.device(device_type)).distributed_type.value


PROBES = [
    "is_cuda_available", "is_rocm_available", "is_xpu_available", "is_xccl_available", "is_mps_available",
    "is_npu_available", "is_mlu_available", "is_musa_available", "is_sdaa_available", "is_hpu_available",
    "is_habana_gaudi1", "is_neuron_available", "is_torch_xla_available", "is_fp16_available",
    "check_cuda_fp8_capability", "is_transformer_engine_mxfp8_available",
]  # fmt: skip


@pytest.mark.parametrize("name", PROBES)
def test_every_probe_answers_yes_or_no_on_any_machine(name):
    assert getattr(probes, name)() in {True, False}


@given(st.sets(st.integers(0, 300)))
def test_a_list_of_cores_is_read_as_the_kernel_writes_it(cores):
    spans, ordered = [], sorted(cores)
    for core in ordered:
        if spans and spans[-1][1] == core - 1:
            spans[-1][1] = core
        else:
            spans.append([core, core])
    text = ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)
    assert affinity._parse_cpu_list(text + "\n") == ordered


def test_the_cores_near_a_device_come_from_the_kernel(tmp_path):
    (tmp_path / "0000:3b:00.0").mkdir()
    (tmp_path / "0000:3b:00.0" / "local_cpulist").write_text("0-1,4\n")
    assert affinity.near_cores("0000:3b:00.0", tmp_path) == {0, 1, 4}
    assert affinity.near_cores("0000:3c:00.0", tmp_path) == set()


@pytest.fixture
def pinned(monkeypatch, tmp_path):
    """A machine with two GPUs near to different cores; what the process is pinned to."""
    calls: list[set[int]] = []
    for bus, cores in (("3b", "0-1"), ("86", "2-3")):
        (tmp_path / f"0000:{bus}:00.0").mkdir()
        (tmp_path / f"0000:{bus}:00.0" / "local_cpulist").write_text(cores)
    cuda = FakeNamespace(2)
    buses = (0x3B, 0x86)
    cuda.get_device_properties = lambda index: types.SimpleNamespace(
        pci_domain_id=0, pci_bus_id=buses[index], pci_device_id=0
    )
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(affinity, "is_cuda_available", lambda: True)
    monkeypatch.setattr(affinity, "_SYSFS", tmp_path)
    monkeypatch.setattr(affinity.near_cores, "__defaults__", (tmp_path,))
    monkeypatch.setattr(affinity.os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(affinity.os, "sched_setaffinity", lambda pid, cores: calls.append(set(cores)))
    affinity.set_numa_affinity.cache_clear()
    yield calls
    affinity.set_numa_affinity.cache_clear()


def test_a_process_is_pinned_to_the_cores_near_its_gpu_once(pinned):
    affinity.set_numa_affinity(1)
    affinity.set_numa_affinity(1)
    assert pinned == [{2, 3}]


def test_pinning_can_be_overridden(pinned):
    affinity.set_numa_affinity(0)
    affinity.override_numa_affinity(0)
    assert pinned == [{0, 1}, {0, 1}]


def test_pinning_without_a_gpu_does_nothing_and_says_so(monkeypatch, caplog):
    monkeypatch.setattr(affinity, "is_cuda_available", lambda: False)
    with caplog.at_level("INFO"):
        affinity.override_numa_affinity(0)
    assert "no CUDA device" in caplog.text


@pytest.fixture
def nvidia_smi(monkeypatch):
    def answer(**fields: str) -> None:
        def run(command, **kwargs):
            field = command[1].removeprefix("--query-gpu=")
            if field not in fields:
                raise FileNotFoundError("nvidia-smi")
            return subprocess.CompletedProcess(command, 0, stdout=fields[field])

        monkeypatch.setattr(device_kinds.subprocess, "run", run)

    return answer


@pytest.mark.parametrize(
    ("names", "driver", "supported"),
    [
        ("NVIDIA GeForce RTX 4090\nNVIDIA GeForce RTX 4090\n", "545.23.08", False),
        ("NVIDIA GeForce RTX 4090\nNVIDIA GeForce RTX 4090\n", "550.54.14", True),
        ("NVIDIA GeForce RTX 4090\n", "545.23.08", True),
        ("NVIDIA A100-SXM4-80GB\nNVIDIA A100-SXM4-80GB\n", "470.57.02", True),
    ],
)
def test_cards_without_peer_access_are_known(nvidia_smi, names, driver, supported):
    nvidia_smi(name=names, driver_version=driver)
    assert device_kinds.check_cuda_p2p_ib_support() is supported


def test_several_cards_without_peer_access_are_refused_until_nccl_knows(nvidia_smi):
    nvidia_smi(name="NVIDIA GeForce RTX 4090\nNVIDIA GeForce RTX 4090\n", driver_version="545.23.08")
    cuda, known = BY_NAME["cuda"], {"NCCL_P2P_DISABLE": "1"}
    with pytest.raises(NotImplementedError, match=r"RTX 4090, driver 545.*set NCCL_IB_DISABLE=1, as"):
        runtime._check_peer_access(cuda, known)
    runtime._check_peer_access(cuda, {**known, **device_kinds.peer_variables(known)})
    runtime._check_peer_access(BY_NAME["rocm"], {})
    nvidia_smi(name="NVIDIA A100\nNVIDIA A100\n")
    runtime._check_peer_access(cuda, {})


def test_gpus_are_counted_without_torch(nvidia_smi):
    nvidia_smi(name="NVIDIA A100\nNVIDIA A100\n", driver_version="550.54.14\n550.54.14\n")
    assert device_kinds.get_gpu_info() == (["NVIDIA A100", "NVIDIA A100"], 2)
    assert device_kinds.get_driver_version() == "550.54.14"


def test_a_machine_without_a_driver_has_no_gpus_and_no_driver_version(nvidia_smi):
    nvidia_smi()
    assert device_kinds.get_gpu_info() == ([], 0)
    assert device_kinds.check_cuda_p2p_ib_support()
    with pytest.raises(MissingDependencyError, match="nvidia-smi"):
        device_kinds.get_driver_version()


@pytest.mark.parametrize(
    ("release", "warned"), [("5.4.0-42-generic", True), ("5.5.0", False), ("6.1+", False)]
)
def test_old_kernels_are_warned_about(monkeypatch, caplog, release, warned):
    monkeypatch.setattr(device_kinds.platform, "system", lambda: "Linux")
    monkeypatch.setattr(device_kinds.platform, "release", lambda: release)
    device_kinds.check_os_kernel()
    # The message itself has the versions: programs read `record.msg`.
    messages = [record.msg for record in caplog.records]
    assert [("5.4.0" in message, "5.5" in message) for message in messages] == [(True, True)] * warned


@pytest.mark.parametrize("name", ["xpu", "npu", "mlu", "musa", "sdaa", "neuron"])
def test_a_device_that_is_absent_is_so_whatever_is_checked(name):
    probe = getattr(probes, f"is_{name}_available")
    assert [probe(), probe(check_device=True), probe(True)] == [False] * 3


def test_checking_a_device_asks_its_driver(monkeypatch):
    monkeypatch.setattr(DeviceKind, "probe", lambda kind: True)
    probe = probes.is_npu_available.__wrapped__
    for count in (0, 2):
        monkeypatch.setattr(torch, "npu", FakeNamespace(count), raising=False)
        assert (probe(), probe(check_device=True)) == (True, count > 0)


def test_one_kind_of_hardware_behind_xla_can_be_checked():
    assert not probes.is_torch_xla_available(check_is_tpu=True)
    assert not probes.is_torch_xla_available(check_is_gpu=True)
    with pytest.raises(SettingsError, match="choose one"):
        probes.is_torch_xla_available(check_is_tpu=True, check_is_gpu=True)


def test_ascend_comes_before_the_cuda_that_it_pretends_to_be(monkeypatch) -> None:
    monkeypatch.setattr(DeviceKind, "probe", lambda kind: kind.name in {"npu", "cuda", "cpu"})
    assert available_kind().name == "npu"


def test_amd_computes_in_float8_too(monkeypatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 4))
    assert probes.check_cuda_fp8_capability.__wrapped__()


def test_a_driver_that_never_answers_is_named(monkeypatch) -> None:
    def run(*_, timeout, **__):
        raise subprocess.TimeoutExpired("nvidia-smi", timeout)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(MissingDependencyError, match="nvidia-smi does not respond"):
        device_kinds.nvidia_smi("name")


def test_a_gaudi_process_uses_its_own_module_and_registers_its_collectives(monkeypatch) -> None:
    monkeypatch.setattr(torch, "hpu", FakeNamespace(8, current=0), raising=False)
    kind = BY_NAME["hpu"]
    assert select.default_device(kind, 3, 8) == torch.device("hpu", 0)
    imported = []
    monkeypatch.setattr(select, "import_module", imported.append)
    select.register_collectives(kind)
    select.register_collectives(BY_NAME["cuda"])
    assert imported == ["habana_frameworks.torch.distributed.hccl"]
