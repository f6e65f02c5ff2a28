"""Where the time of a training run goes: phases, speeds, use of the hardware. See README.md."""
