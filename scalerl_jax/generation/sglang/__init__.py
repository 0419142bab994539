"""Rollouts from a fleet of SGLang servers."""
