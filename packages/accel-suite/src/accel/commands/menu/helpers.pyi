# fmt: off
