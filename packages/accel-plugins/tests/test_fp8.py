from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from accel_plugins.bundle import Bundle
from accel_plugins.deepspeed.plugin import DeepSpeedPlugin
from accel_plugins.fp8 import msamp
from accel_plugins.fp8.ao import convert_model_to_fp8_ao, filter_first_and_last_linear_layers, has_ao_layers
from accel_plugins.fp8.build import build
from accel_plugins.fp8.te import has_transformer_engine_layers, recipe_options
from accel_plugins.fp8.weights import plain_tensor, tied_layers
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.kwargs.amp import AutocastKwargs
from accel_plugins.kwargs.fp8 import AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from accel_plugins.parallelism.config import ParallelismConfig
from accel_plugins.recipe import build_recipe
from accel_state.available import is_installed
from accel_state.errors import MissingDependencyError, SettingsError, UnsupportedError
from accel_state.logging import get_logger
from accel_state.runtime import Runtime
from accel_state.settings.model import Settings


def test_fields_have_the_documented_defaults():
    te, ao = TERecipeKwargs(), AORecipeKwargs()
    assert (te.use_autocast_during_eval, te.margin, te.interval, te.fp8_format) == (False, 0, 1, "HYBRID")
    assert (te.amax_history_len, te.amax_compute_algo) == (1024, "most_recent")
    assert (te.override_linear_precision, te.use_mxfp8_block_scaling) == ((False, False, False), False)
    assert (ao.config, ao.pad_inner_dim, ao.enable_fsdp_float8_all_gather) == (None, True, True)
    assert MSAMPRecipeKwargs().opt_level == "O2"


def test_the_environment_fills_fields_and_an_argument_wins(monkeypatch):
    for name, value in {
        "MARGIN": "2", "FORMAT": "e4m3", "OVERRIDE_WGRAD": "true", "PAD_INNER_DIM": "false",
        "OPT_LEVEL": "O1", "USE_AUTOCAST_DURING_EVAL": "true", "USE_MXFP8_BLOCK_SCALING": "true",
        "BACKEND": "msamp",
    }.items():  # fmt: skip
        monkeypatch.setenv(f"ACCELERATE_FP8_{name}", value)
    te = TERecipeKwargs(margin=1)
    assert (te.margin, te.fp8_format, te.override_linear_precision) == (1, "E4M3", (False, False, True))
    assert (te.use_autocast_during_eval, te.recipe) == (True, "mxfp8")
    assert AORecipeKwargs().pad_inner_dim is False
    assert MSAMPRecipeKwargs().opt_level == "O1"
    with pytest.warns(FutureWarning, match="deprecated"):
        assert FP8RecipeKwargs().backend == "MSAMP"


def test_a_recipe_as_an_argument_wins_over_block_scaling_in_the_environment(monkeypatch):
    monkeypatch.setenv("ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING", "true")
    with pytest.warns(FutureWarning, match="deprecated"):
        old = FP8RecipeKwargs(recipe="delayed")
    for made in (TERecipeKwargs(recipe="delayed"), old):
        assert (made.recipe, made.use_mxfp8_block_scaling) == ("delayed", False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AORecipeKwargs(config="fast"), "config='fast'.*'tensorwise'"),
        (lambda: AORecipeKwargs(config="rowwise", enable_fsdp_float8_all_gather=True), "tensorwise"),
        (lambda: AORecipeKwargs(pad_inner_dim="no"), "pad_inner_dim='no'"),
        (lambda: TERecipeKwargs(margin=-1), "margin=-1"),
        (lambda: TERecipeKwargs(fp8_format="E3M4"), "fp8_format='E3M4'"),
        (lambda: TERecipeKwargs(recipe="current", use_mxfp8_block_scaling=True), "contradict"),
        (lambda: MSAMPRecipeKwargs(opt_level="O3"), "opt_level='O3'"),
    ],
)
def test_fields_that_cannot_be_are_refused(make, message):
    with pytest.raises(SettingsError, match=message):
        make()


def test_handlers_are_for_fp8_and_one_at_a_time():
    handlers = {AORecipeKwargs: AORecipeKwargs(), AutocastKwargs: AutocastKwargs()}
    with pytest.raises(SettingsError, match=r"AORecipeKwargs, which is for mixed_precision='fp8'.*'bf16'"):
        build_recipe("bf16", Settings(), Runtime(), handlers)
    with pytest.raises(SettingsError, match="AORecipeKwargs and TERecipeKwargs"):
        build(Settings(), Runtime(), {**handlers, TERecipeKwargs: TERecipeKwargs()})


def test_what_cannot_run_here_names_what_can():
    with pytest.raises(UnsupportedError, match=r"TransformerEngine trains on.*'cuda', not 'cpu'.*'AO'"):
        build(Settings(), Runtime(), {TERecipeKwargs: TERecipeKwargs()})
    with pytest.raises(UnsupportedError, match=r"MS-AMP trains on.*AORecipeKwargs\(\)"):
        build(Settings(), Runtime(), {MSAMPRecipeKwargs: MSAMPRecipeKwargs()})
    if not is_installed("msamp"):
        with pytest.raises(MissingDependencyError, match=r"MS-AMP cannot be imported.*AORecipeKwargs\(\)"):
            msamp.build(MSAMPRecipeKwargs(), sharded=False, world_size=1)
    with pytest.raises(
        UnsupportedError, match=r"MS-AMP trains in one process or under DDP.*AORecipeKwargs\(\)"
    ):
        msamp.build(MSAMPRecipeKwargs(), sharded=True, world_size=2)
    if not is_installed("torchao"):
        with pytest.raises(MissingDependencyError, match=r"pip install 'accel-plugins\[torchao\]'"):
            build(Settings(), Runtime(), {})


def test_the_backend_that_nobody_named_is_said_once(caplog, monkeypatch):
    pytest.importorskip("torchao")
    monkeypatch.setattr("accel_plugins.fp8.build.logger", get_logger("tests.fp8", log_level="WARNING"))

    def said():
        return [one.getMessage() for one in caplog.records if one.name == "tests.fp8"]

    assert build(Settings(), Runtime(), {AORecipeKwargs: AORecipeKwargs()}).backend == "AO"
    assert said() == []
    for _ in range(2):
        assert build(Settings(), Runtime(), {}).backend == "AO"
    (message,) = said()
    assert message.startswith("mixed_precision='fp8' uses torchao; fp8_backend or a kwargs handler chooses")


def test_options_that_a_recipe_does_not_take_are_refused_unless_they_are_at_their_default():
    known = dict.fromkeys(("margin", "fp8_format", "amax_history_len", "amax_compute_algo"))
    assert recipe_options(TERecipeKwargs(margin=3), known) == {
        "margin": 3, "fp8_format": "HYBRID", "amax_history_len": 1024, "amax_compute_algo": "most_recent",
    }  # fmt: skip
    with pytest.raises(UnsupportedError, match="interval=2"):
        recipe_options(TERecipeKwargs(interval=2), known)
    blocks = dict.fromkeys(("margin", "fp8_format"))
    assert recipe_options(TERecipeKwargs(recipe="mxfp8"), blocks) == {"margin": 0}
    with pytest.raises(UnsupportedError, match=r"amax_history_len=16.*MXFP8BlockScaling"):
        recipe_options(TERecipeKwargs(recipe="mxfp8", amax_history_len=16), blocks)


def test_tied_layers_and_plain_tensors_are_found():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[2].weight = model[0].weight
    assert tied_layers(model) == {"0", "2"}
    assert plain_tensor(model[1].weight) is model[1].weight
    assert not has_transformer_engine_layers(model)


@pytest.mark.parametrize("sizes", [[16], [16, 16], [16, 32, 16], [16, 8, 32, 16, 16]])
def test_the_public_filter_chooses_what_is_converted_without_one(sizes):
    pytest.importorskip("torchao")
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(a, b), torch.nn.GELU()) for a, b in pairwise([16, *sizes]))
    )
    names = [name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)]
    expected = {name for name in names if filter_first_and_last_linear_layers(model, name)}
    kind = type(model[0][0])
    convert_model_to_fp8_ao(model)
    assert {name for name in names if type(model.get_submodule(name)) is not kind} == expected


def test_a_model_that_is_one_layer_is_its_first_and_last():
    pytest.importorskip("torchao")
    layer = torch.nn.Linear(16, 16)
    assert not filter_first_and_last_linear_layers(layer, "")
    convert_model_to_fp8_ao(layer)
    assert type(layer) is torch.nn.Linear


@pytest.mark.parametrize(
    "handler",
    [
        ParallelismConfig(tp_size=2),
        FullyShardedDataParallelPlugin(fsdp_version=1),
        DeepSpeedPlugin(zero_stage=1),
    ],
)
def test_blocks_of_values_are_refused_where_weights_lose_their_type(handler):
    pytest.importorskip("torchao")
    with pytest.raises(UnsupportedError, match=r"config='mxfp8'.*one process, with DDP and FSDP2.*'rowwise'"):
        build(Settings(), Runtime(), {AORecipeKwargs: AORecipeKwargs(config="mxfp8"), type(handler): handler})


def converted_to_blocks(model, wanted):
    handlers = {AORecipeKwargs: AORecipeKwargs(config="mxfp8", module_filter_func=wanted)}
    recipe = build(Settings(), Runtime(), handlers)
    recipe.convert(Bundle(models=[model]), Runtime(), None)
    return model


def test_layers_scaled_by_blocks_add_their_bias():
    pytest.importorskip("torchao")
    layer = torch.nn.Linear(32, 32)
    torch.nn.init.normal_(layer.bias)
    inputs = torch.randn(32, 32)
    expected = layer(inputs)
    model = converted_to_blocks(torch.nn.Sequential(layer), lambda *_: True)
    assert has_ao_layers(model)
    with torch.autocast("cpu", torch.bfloat16):
        found = model(inputs)
    assert found.dtype == torch.bfloat16
    found.float().sum().backward()
    assert (found.float() - expected).square().mean().sqrt() < 0.05 * expected.std()
    torch.testing.assert_close(layer.bias.grad, torch.full((32,), 32.0))


@pytest.mark.parametrize(("shape", "width"), [((7, 64), 64), ((3, 5, 64), 64), ((64,), 64), ((2, 48), 48)])
def test_inputs_of_any_size_pass_layers_scaled_by_blocks(shape, width):
    """Rows are padded to 32; layers whose own sizes 32 does not divide stay as they are."""
    pytest.importorskip("torchao")
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(3)))
    inputs = torch.randn(shape)
    expected = model(inputs)
    found = converted_to_blocks(model, None)(inputs)
    assert has_ao_layers(model) is (width % 32 == 0)
    assert (found - expected).norm() < 0.1 * expected.norm()
    found.sum().backward()
    assert all(one.grad is not None for one in model.parameters())


def test_a_layer_of_another_class_is_not_scaled_by_blocks():
    pytest.importorskip("torchao")

    class Own(torch.nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs) + 1

    with pytest.raises(UnsupportedError, match=r"'0' is a layer of class Own.*module_filter_func"):
        converted_to_blocks(torch.nn.Sequential(Own(32, 32)), lambda *_: True)
