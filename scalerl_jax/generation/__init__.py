"""Sampling, the decode loop, and the engines behind one protocol."""
