"""Experiment trackers: they mirror the run directory and decide nothing."""
