"""On-page checks: pure functions over parsed HTML, no model; see README.md."""
