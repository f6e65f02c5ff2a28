"""What every process of the tests does first: it starts and ends as fast as the command does."""

import atexit
import gc

from lit_models import late_torchmetrics

late_torchmetrics.install()
atexit.register(gc.freeze)
