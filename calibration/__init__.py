"""PASK's offline calibration: from runs of interventions to a frozen policy."""
