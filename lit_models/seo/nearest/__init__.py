"""Search over more documents than one rank should read for every query."""
