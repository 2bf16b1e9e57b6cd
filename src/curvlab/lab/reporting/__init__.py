"""From verdicts to pictures, pages and the report."""
