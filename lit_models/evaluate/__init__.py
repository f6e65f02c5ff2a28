"""Tasks of lm-eval on language models, their requests answered by a planned prediction."""
