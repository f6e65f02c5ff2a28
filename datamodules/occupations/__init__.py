"""Tables of job descriptions and occupation codes."""
