"""What a run will take before it begins: the arithmetic and the rehearsal of `unisono plan`."""
