"""What a run folder tells, as one page of HTML: `unisono report`."""
