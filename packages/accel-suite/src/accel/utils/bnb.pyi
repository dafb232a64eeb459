# fmt: off
from accel_quant.bnb.convert import has_4bit_bnb_layers as has_4bit_bnb_layers
from accel_quant.bnb.load import load_and_quantize_model as load_and_quantize_model
