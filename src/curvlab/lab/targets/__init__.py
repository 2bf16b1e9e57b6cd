"""Targets: their declaration and discovery, their command line, computing, judging, drawing and verifying."""
