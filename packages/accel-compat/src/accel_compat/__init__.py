"""Make `import accelerate` resolve to accel in this process, for libraries that import it.

Call `install()` before anything imports `accelerate`, or run a script with `python -m accel_compat`.

Example::

    import accel_compat

    accel_compat.install()
    import accelerate  # is accel
"""

from accel_state.lazy import attach

attach(__name__)
