from __future__ import annotations

import pytest

from accel_cli.launch import hosts


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, 8),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "0"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "0, 3"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "0,-1,3"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8932f937,MIG-5c89852c"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7,8,9"}, 8),
        ({"HIP_VISIBLE_DEVICES": "0,1"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2", "ROCR_VISIBLE_DEVICES": "0"}, 1),
    ],
)
def test_the_environment_narrows_the_choice_of_gpus(environ, expected):
    assert hosts.count_gpus(environ, 8) == expected


def test_this_machine_has_cores_and_no_hidden_gpus():
    found = hosts.probe_devices({"CUDA_VISIBLE_DEVICES": ""})
    assert found.cores >= 1
    assert found.gpus == 0


def test_each_label_of_several_devices_restricts_them_by_its_own_variable():
    assert hosts.VISIBLE_DEVICES == {
        "MULTI_GPU": "CUDA_VISIBLE_DEVICES",
        "MULTI_XPU": "ZE_AFFINITY_MASK",
        "MULTI_NPU": "ASCEND_RT_VISIBLE_DEVICES",
        "MULTI_MLU": "MLU_VISIBLE_DEVICES",
        "MULTI_SDAA": "SDAA_VISIBLE_DEVICES",
        "MULTI_MUSA": "MUSA_VISIBLE_DEVICES",
        "MULTI_HPU": "HABANA_VISIBLE_MODULES",
        "MULTI_NEURON": "NEURON_RT_VISIBLE_CORES",
    }
