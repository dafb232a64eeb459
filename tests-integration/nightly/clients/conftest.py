"""The environment of the libraries that import `accelerate`."""

from __future__ import annotations

from harness.clients import clients_environ, python

__all__ = ["clients_environ", "python"]
