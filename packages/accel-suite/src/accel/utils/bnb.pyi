# fmt: off
from accel_quant.layers import has_4bit_bnb_layers as has_4bit_bnb_layers
from accel_quant.load import load_and_quantize_model as load_and_quantize_model
