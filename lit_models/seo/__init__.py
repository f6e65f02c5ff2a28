"""Search text: score it, rank it, find it, write its title and description."""
