from accel_plugins.kwargs import comm_hooks as comm_hooks
