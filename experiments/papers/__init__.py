"""The papers' numbers and headline claims, as data."""

from pathlib import Path

FOLDER = Path(__file__).parent
