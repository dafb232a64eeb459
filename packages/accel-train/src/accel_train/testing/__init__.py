"""Helpers for tests of training programs: requirements, subprocesses, a small regression problem."""
