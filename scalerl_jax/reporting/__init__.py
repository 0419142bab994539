"""What a run leaves behind: compute, metrics, curve and report."""
