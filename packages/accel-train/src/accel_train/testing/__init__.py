"""Helpers for tests of training programs: requirements, programs in other processes, a small problem."""
