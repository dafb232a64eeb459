from __future__ import annotations

import copy
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from accel_plugins.deepspeed.strategy import DeepSpeedStrategy
from accel_plugins.fp8 import ao, te
from accel_plugins.fp8.ao import (
    convert_model_to_fp8_ao,
    filter_first_and_last_linear_layers,
    filter_linear_layers,
    find_first_last_linear_layers,
    has_ao_layers,
)
from accel_plugins.fp8.build import build
from accel_plugins.fp8.recipe import (
    AORecipeKwargs,
    FP8RecipeKwargs,
    MSAMPRecipeKwargs,
    TERecipeKwargs,
    build_recipe,
    plain_tensor,
    tied_layers,
)
from accel_plugins.fp8.te import has_transformer_engine_layers, recipe_options
from accel_plugins.fsdp.fsdp1 import Fsdp1Strategy
from accel_plugins.kwargs import AutocastKwargs
from accel_plugins.parallelism.config import ParallelismConfig
from accel_plugins.precision import build_precision
from accel_plugins.sharding.wrap import switch_parameters
from accel_plugins.strategy import Strategy
from accel_state.errors import MissingDependencyError, SettingsError, UnsupportedError
from accel_state.libraries import BY_NAME, is_installed
from accel_state.logging import get_logger
from accel_state.runtime import Runtime
from accel_state.settings.model import Settings


def strategy_of(handlers):
    return Strategy(Settings(), Runtime(), build_precision("no", torch.device("cpu")), handlers)


def test_fields_have_the_documented_defaults():
    engine, torchao = TERecipeKwargs(), AORecipeKwargs()
    assert (engine.use_autocast_during_eval, engine.margin, engine.interval) == (False, 0, 1)
    assert (engine.fp8_format, engine.amax_history_len) == ("HYBRID", 1024)
    assert engine.amax_compute_algo == "most_recent"
    assert engine.override_linear_precision == (False, False, False)
    assert engine.use_mxfp8_block_scaling is False
    assert (torchao.pad_inner_dim, torchao.enable_fsdp_float8_all_gather) == (True, True)
    assert (torchao.config is not None) is is_installed("torchao")
    assert MSAMPRecipeKwargs().opt_level == "O2"


def test_the_environment_fills_fields_and_an_argument_wins(monkeypatch):
    for name, value in {
        "MARGIN": "2", "FORMAT": "e4m3", "OVERRIDE_WGRAD": "true", "PAD_INNER_DIM": "false",
        "OPT_LEVEL": "O1", "USE_AUTOCAST_DURING_EVAL": "true", "USE_MXFP8_BLOCK_SCALING": "true",
        "BACKEND": "msamp",
    }.items():  # fmt: skip
        monkeypatch.setenv(f"ACCELERATE_FP8_{name}", value)
    engine = TERecipeKwargs(margin=1)
    assert (engine.margin, engine.fp8_format) == (1, "E4M3")
    assert engine.override_linear_precision == (False, False, True)
    assert (engine.use_autocast_during_eval, engine.recipe) == (True, "mxfp8")
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
        (lambda: AORecipeKwargs(config=3), "config=3.*Float8LinearConfig"),
        (lambda: AORecipeKwargs(config={"emulate": True}), "config={'emulate': True}.*Float8LinearConfig"),
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


def test_the_algorithm_for_the_largest_value_may_be_in_capitals():
    assert TERecipeKwargs(amax_compute_algo="MAX").amax_compute_algo == "max"


def test_the_default_configuration_of_torchao_is_in_the_field_and_emulated_on_a_cpu():
    float8 = pytest.importorskip("torchao.float8")
    default = AORecipeKwargs(pad_inner_dim=False)
    assert default.config == float8.Float8LinearConfig(
        pad_inner_dim=False, enable_fsdp_float8_all_gather=True
    )
    for handler in (default, copy.deepcopy(default)):
        config = ao.config_of(handler, torch.device("cpu"), sharded=False)
        assert (config.emulate, config.pad_inner_dim) == (True, False)
    given = AORecipeKwargs(config=float8.Float8LinearConfig())
    assert ao.config_of(given, torch.device("cpu"), sharded=False) is given.config


@pytest.mark.parametrize("config", [None, "rowwise"])
def test_weights_are_converted_again_in_the_backward_pass_where_torchao_heeds_it(config):
    pytest.importorskip("torchao.float8")
    for asked in (True, None):
        handler = AORecipeKwargs(config=config, force_recompute_fp8_weight_in_bwd=asked)
        configured = ao.config_of(handler, torch.device("cpu"), sharded=False)
        assert configured.force_recompute_fp8_weight_in_bwd is bool(asked)


def test_recipes_may_be_named_by_the_enum_of_torchao():
    float8 = pytest.importorskip("torchao.float8")
    for recipe in float8.Float8LinearRecipeName:
        assert AORecipeKwargs(config=recipe).config == recipe.value
    with pytest.raises(SettingsError, match=r"convert_model_to_fp8_ao\(config='rowwise'\)"):
        convert_model_to_fp8_ao(torch.nn.Sequential(torch.nn.Linear(16, 16)), config="rowwise")


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_inputs_in_float32_are_cast_as_autocast_does(name):
    pytest.importorskip("torchao")
    layer = torch.nn.Linear(32, 32)
    handlers = {AORecipeKwargs: AORecipeKwargs(config=name, module_filter_func=lambda *_: True)}
    model = torch.nn.Sequential(layer)
    build(Settings(), strategy_of(handlers)).convert([model])
    inputs = torch.randn(16, 32)
    grads = []
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", torch.bfloat16):
            output = model(inputs.to(dtype))
        assert output.dtype == torch.bfloat16
        output.float().square().sum().backward()
        grads.append(layer.weight.grad)
        layer.weight.grad = None
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)
    assert model(inputs).dtype == torch.float32


def test_filters_choose_by_name_and_size():
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10))
    assert find_first_last_linear_layers(model) == ("0", "2")
    assert find_first_last_linear_layers(model[1]) == (None, None)
    assert find_first_last_linear_layers(model[0]) == ("", "")
    wanted = [filter_linear_layers(layer, "x", ["y"]) for layer in model]
    assert wanted == [True, True, False]
    assert not any(filter_linear_layers(layer, "x", ["y", "x"]) for layer in model)
    assert filter_linear_layers(model[0], "x.y", ["x"])


def test_handlers_are_for_fp8_and_one_at_a_time():
    handlers = {AORecipeKwargs: AORecipeKwargs(), AutocastKwargs: AutocastKwargs()}
    with pytest.raises(SettingsError, match=r"AORecipeKwargs, which needs mixed_precision='fp8'.*'bf16'"):
        build_recipe("bf16", Settings(), strategy_of(handlers))
    with pytest.raises(SettingsError, match="AORecipeKwargs and TERecipeKwargs"):
        build(Settings(), strategy_of({**handlers, TERecipeKwargs: TERecipeKwargs()}))


def test_what_cannot_run_here_names_what_can():
    with pytest.raises(UnsupportedError, match=r"TransformerEngine trains on.*'cuda', not 'cpu'.*'AO'"):
        build(Settings(), strategy_of({TERecipeKwargs: TERecipeKwargs()}))
    with pytest.raises(UnsupportedError, match=r"MS-AMP is no longer developed.*AORecipeKwargs\(\)"):
        build(Settings(), strategy_of({MSAMPRecipeKwargs: MSAMPRecipeKwargs()}))
    if not is_installed("torchao"):
        with pytest.raises(MissingDependencyError, match=r"pip install 'accel-plugins\[torchao\]'"):
            build(Settings(), strategy_of({}))


def test_the_backend_that_nobody_named_is_said_once(caplog, monkeypatch):
    pytest.importorskip("torchao")
    monkeypatch.setattr("accel_plugins.fp8.build.logger", get_logger("tests.fp8", log_level="WARNING"))

    def said():
        return [record.getMessage() for record in caplog.records if record.name == "tests.fp8"]

    assert build(Settings(), strategy_of({AORecipeKwargs: AORecipeKwargs()})).backend == "AO"
    assert said() == []
    for _ in range(2):
        assert build(Settings(), strategy_of({})).backend == "AO"
    (message,) = said()
    assert message.startswith("mixed_precision='fp8' uses torchao. Set fp8_backend or pass a kwargs handler")


@pytest.mark.parametrize(
    ("sizes", "recipe", "text"),
    [
        ({"pp_size": 2}, None, r"recipe='delayed'\) with ParallelismConfig\(pp_size=2\)"),
        ({"tp_size": 2}, "current", r"TERecipeKwargs with ParallelismConfig\(tp_size=2\)"),
    ],
)
def test_axes_that_transformer_engine_cannot_share_are_refused(sizes, recipe, text, monkeypatch):
    monkeypatch.setattr(
        "accel_plugins.fp8.build.choose_backend", lambda *_, **__: BY_NAME["TE"]
    )  # as on a GPU
    handlers = {TERecipeKwargs: TERecipeKwargs(recipe=recipe), ParallelismConfig: ParallelismConfig(**sizes)}
    with pytest.raises(UnsupportedError, match=text):
        build(Settings(), strategy_of(handlers))


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
    ("kind", "handlers"),
    [
        (Strategy, {ParallelismConfig: ParallelismConfig(tp_size=2)}),
        (Fsdp1Strategy, {}),
        (DeepSpeedStrategy, {}),
    ],
)
def test_blocks_of_values_are_refused_where_weights_lose_their_type(kind, handlers):
    pytest.importorskip("torchao")
    strategy = strategy_of({AORecipeKwargs: AORecipeKwargs(config="mxfp8"), **handlers})
    strategy.keeps_weight_types = kind.keeps_weight_types
    with pytest.raises(UnsupportedError, match=r"config='mxfp8'.*one process, with DDP and FSDP2.*'rowwise'"):
        build(Settings(), strategy)


def converted_to_blocks(model, wanted):
    handlers = {AORecipeKwargs: AORecipeKwargs(config="mxfp8", module_filter_func=wanted)}
    recipe = build(Settings(), strategy_of(handlers))
    recipe.convert([model])
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
        output = model(inputs)
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert (output.float() - expected).square().mean().sqrt() < 0.05 * expected.std()
    torch.testing.assert_close(layer.bias.grad, torch.full((32,), 32.0))


@pytest.mark.parametrize(("shape", "width"), [((7, 64), 64), ((3, 5, 64), 64), ((64,), 64), ((2, 48), 48)])
def test_inputs_of_any_size_pass_layers_scaled_by_blocks(shape, width):
    """Rows are padded to 32; layers whose own sizes 32 does not divide stay as they are."""
    pytest.importorskip("torchao")
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(3)))
    inputs = torch.randn(shape)
    expected = model(inputs)
    output = converted_to_blocks(model, None)(inputs)
    assert has_ao_layers(model) is (width % 32 == 0)
    assert (output - expected).norm() < 0.1 * expected.norm()
    output.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_layer_of_another_class_is_not_scaled_by_blocks():
    pytest.importorskip("torchao")

    class Own(torch.nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs) + 1

    with pytest.raises(UnsupportedError, match=r"'0' is a layer of class Own.*module_filter_func"):
        converted_to_blocks(torch.nn.Sequential(Own(32, 32)), lambda *_: True)


class LayerLikeTransformerEngine(torch.nn.Module):
    """Registers parameters as TransformerEngine's layers do: with keywords, which another call forgets."""

    def __init__(self):
        super().__init__()
        self.initialised_by = {}

    def register_parameter(self, name, param, init_fn=None):
        super().register_parameter(name, param)
        self.initialised_by[name] = init_fn


class LinearLikeTransformerEngine(LayerLikeTransformerEngine):
    def __init__(self, in_features, out_features, *, bias, params_dtype, device):
        super().__init__()
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        options = {"dtype": params_dtype, "device": device}
        weight = torch.empty(out_features, in_features, **options)
        self.register_parameter("weight", torch.nn.Parameter(weight), init_fn="normal")
        if bias:
            self.register_parameter("bias", torch.nn.Parameter(torch.empty(out_features, **options)))
        else:
            self.bias = torch.empty(0, **options)

    def forward(self, inputs):
        return torch.nn.functional.linear(inputs, self.weight, self.bias if self.use_bias else None)


class NormLikeTransformerEngine(LayerLikeTransformerEngine):
    def __init__(self, shape, *, eps, params_dtype, device):
        super().__init__()
        self.eps = eps
        for name in ("weight", "bias"):
            value = torch.empty(shape, dtype=params_dtype, device=device)
            self.register_parameter(name, torch.nn.Parameter(value))

    def forward(self, inputs):
        return torch.nn.functional.layer_norm(inputs, self.weight.shape, self.weight, self.bias, self.eps)


class SharingModel(torch.nn.Module):
    """Takes tokens; which layers and parameters it shares is said by a function that gets it."""

    def __init__(self, share):
        super().__init__()
        self.embed = torch.nn.Embedding(16, 16)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(16, 16) for _ in range(4)])
        self.norms = torch.nn.ModuleDict({"a": torch.nn.LayerNorm(16), "b": torch.nn.LayerNorm(16)})
        self.odd = torch.nn.Linear(16, 15)
        self.head = torch.nn.Linear(16, 16, bias=False)
        share(self)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden).tanh()
        hidden = self.norms["b"](self.norms["a"](hidden).sin())
        return self.head(hidden) + self.odd(hidden).sum(-1, keepdim=True)


def share_nothing(model):
    del model


def share_head(model):
    model.head.weight = model.embed.weight


def share_embedding_with_a_layer(model):
    model.embed.weight = model.layers[1].weight


def share_weights_of_layers(model):
    model.layers[2].weight = model.layers[0].weight
    model.layers[3].bias = model.layers[1].bias


def share_a_layer_in_its_container(model):
    model.layers[3] = model.layers[0]


def share_a_layer_between_parents(model):
    model.head = model.layers[1]


def share_a_frozen_weight(model):
    model.head.weight = model.embed.weight
    model.embed.weight.requires_grad_(False)


def share_norms(model):
    model.norms["b"] = model.norms["a"]


def share_a_bias_with_a_norm(model):
    model.layers[0].bias = model.norms["a"].bias


def share_in_a_list_of_parameters(model):
    model.listed = torch.nn.ParameterList([model.layers[0].weight, model.odd.weight, model.norms["a"].bias])


SHARINGS = (
    share_nothing, share_head, share_embedding_with_a_layer, share_weights_of_layers,
    share_a_layer_in_its_container, share_a_layer_between_parents, share_a_frozen_weight, share_norms,
    share_a_bias_with_a_norm, share_in_a_list_of_parameters,
)  # fmt: skip


@pytest.fixture
def stand_in_for_transformer_engine(monkeypatch):
    """TransformerEngine is not imported without a GPU; under test is what happens around its layers."""
    layers = SimpleNamespace(
        Linear=LinearLikeTransformerEngine, LayerNorm=NormLikeTransformerEngine, TransformerLayer=()
    )
    monkeypatch.setattr(te, "_te", lambda: layers)
    monkeypatch.setattr(te, "require", lambda *_, **__: None)


def names_by_parameter(model):
    groups = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), set()).add(name)
    return {frozenset(names) for names in groups.values()}


def trained(model, optimizer):
    generator = torch.Generator().manual_seed(2)
    losses = []
    for _ in range(3):
        tokens = torch.randint(16, (4, 6), generator=generator)
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("share", SHARINGS)
def test_a_model_that_shares_trains_as_before_with_the_layers_of_transformer_engine(
    share, stand_in_for_transformer_engine
):
    def make():
        torch.manual_seed(1)
        model = SharingModel(share)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    expected = trained(*make())
    model, optimizer = make()
    shared = names_by_parameter(model)
    replaced = te.convert_model(model)
    assert all(type(layer) is LinearLikeTransformerEngine for layer in model.layers)
    assert model.layers[0].initialised_by["weight"] == "normal"
    assert names_by_parameter(model) == shared
    switch_parameters(optimizer, replaced)
    torch.testing.assert_close(trained(model, optimizer), expected)
    te.convert_model(model, to_transformer_engine=False)
    assert type(model.layers[0]) is torch.nn.Linear
    assert names_by_parameter(model) == shared
    torch.testing.assert_close(dict(model.state_dict()), expected[1])
