"""Generator and trainer side by side, within the bound on the lag."""
