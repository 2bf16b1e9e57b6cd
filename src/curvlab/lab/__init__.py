"""The lab: what reproduces papers on top of the library. Nothing of the library imports it."""
