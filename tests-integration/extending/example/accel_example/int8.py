"""A precision recipe: linear layers with weights rounded to 8 bits, scaled by their past largest values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from accel_plugins.fp8.recipe import Recipe, RecipeSpec
from accel_plugins.kwargs import KwargsHandler


@dataclass(kw_only=True)
class Int8Kwargs(KwargsHandler):
    """How many steps the scale looks back."""

    history: int = 4


class Int8Linear(torch.nn.Linear):
    """A linear layer that computes with rounded weights; gradients go to the weights as they are."""

    @classmethod
    def of(cls, linear, length):
        made = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        for name, parameter in linear.named_parameters(recurse=False):
            setattr(made, name, torch.nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad))
        largest = linear.weight.detach().abs().amax()
        made.register_buffer("largest", largest.repeat(length))
        return made.train(linear.training)

    def forward(self, inputs):
        scale = self.largest.amax() / 127
        rounded = (self.weight / scale).round().clamp(-127, 127) * scale
        weight = self.weight + (rounded - self.weight).detach()
        return torch.nn.functional.linear(inputs, weight, self.bias)

    @torch.no_grad()
    def note_largest(self):
        """Let the scale of the next step follow the weights that this step has made."""
        new, kept = self.weight.abs().amax(), self.largest
        new = new.full_tensor() if isinstance(new, DTensor) else new
        kept = kept.to_local() if isinstance(kept, DTensor) else kept
        kept.copy_(torch.cat([kept[1:], new.reshape(1)]))


def build(settings, runtime, handlers):
    options = handlers.get(Int8Kwargs) or Int8Kwargs()
    steps = {"steps": 0}

    def convert(bundle, runtime, mesh):
        replaced = {}
        for model in bundle.models:
            for module in [*model.modules()]:
                for name, child in module.named_children():
                    if type(child) is torch.nn.Linear:
                        made = Int8Linear.of(child, options.history)
                        setattr(module, name, made)
                        replaced |= dict(zip(child.parameters(), made.parameters(), strict=True))
        return replaced

    def after_step(models):
        steps["steps"] += 1
        for model in models:
            for module in model.modules():
                if isinstance(module, Int8Linear):
                    module.note_largest()

    return Recipe(
        name="example_int8",
        convert=convert,
        precision="no",
        after_step=after_step,
        state_dict=lambda: dict(steps),
        load_state_dict=steps.update,
    )


SPEC = RecipeSpec(name="example_int8", build=build, handlers=(Int8Kwargs,))
