"""The subcommands as modules: `python -m accel.commands.launch train.py` is `accel launch train.py`."""
