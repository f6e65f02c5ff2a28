"""What the subject's own unembedding says of an activation: the logit lens and the tuned lens."""
