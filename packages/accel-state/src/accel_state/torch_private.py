"""Every private torch name, nothing else."""

from __future__ import annotations
