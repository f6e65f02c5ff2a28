"""Parts of a lens by their names: rates of their own, and gradients that are clipped apart."""
