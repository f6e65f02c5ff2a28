"""What `unisono doctor` looks at: each file returns findings, nothing here trains."""
