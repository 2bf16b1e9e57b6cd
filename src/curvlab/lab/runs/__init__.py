"""Runs of targets: configuration, resumable store, provenance, tracking."""
