"""Order, batches and stores that every datamodule stands on."""
